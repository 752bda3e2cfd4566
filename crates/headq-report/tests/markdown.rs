//! The Markdown report: the same content as the HTML report.

#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use common::*;
use headq_lab::diagnose::data::LINKS;
use headq_report::{Run, html, markdown};

const COMMAND: &str = "headq report runs/usual --out usual.html";

/// Cells of a line of a table: what stands between vertical bars that are not escaped.
fn cells(line: &str) -> usize {
    line.replace("\\|", "").matches('|').count() - 1
}

fn documents() -> Vec<Vec<Run>> {
    let alone = extremes().into_iter().map(|(_, run)| vec![run]);
    alone
        .chain([
            vec![diagnosed("usual", SMALL)],
            vec![evaluated()],
            vec![finetuned()],
            vec![diagnosed("a", SMALL), evaluated()],
        ])
        .collect()
}

#[test]
fn tables_are_well_formed() {
    for runs in documents() {
        let text = markdown(&runs, COMMAND);
        let blocks: Vec<&str> = text.split("\n\n").filter(|block| block.starts_with('|')).collect();
        assert!(!blocks.is_empty());
        for block in blocks {
            let lines: Vec<&str> = block.lines().collect();
            let columns = cells(lines[0]);
            assert!(lines.iter().all(|line| line.starts_with('|') && line.ends_with('|')), "{block}");
            assert!(lines.iter().all(|line| cells(line) == columns), "{block}");
            assert!(lines[1].chars().all(|c| matches!(c, '|' | '-' | ':')), "{}", lines[1]);
        }
    }
}

#[test]
fn tables_and_figures_are_those_of_the_html_report() {
    for runs in documents() {
        let (text, page) = (markdown(&runs, COMMAND), html(&runs, COMMAND));
        for kind in ["Table", "Figure"] {
            let in_text = text.matches(&format!("**{kind} ")).count();
            assert_eq!(in_text, page.matches(&format!("<strong>{kind} ")).count());
        }
        let headings = |text: &str| text.lines().filter(|line| line.starts_with("## ")).count();
        assert_eq!(headings(&text), page.matches("<h2>").count());
    }
}

#[test]
fn it_says_verdicts_and_provenance() {
    let run = diagnosed("usual", SMALL);
    let text = markdown(std::slice::from_ref(&run), COMMAND);
    let diagnosis = run.diagnosis.unwrap();
    for ((_, title, claim), judgement) in LINKS.iter().zip(diagnosis.judgements()) {
        let judgement = judgement.unwrap();
        assert!(text.contains(&format!(" {title} | {claim} | ")), "{title}");
        assert!(text.contains(&format!("{}.** {}", judgement.verdict, judgement.because)), "{title}");
    }
    assert_eq!(text.matches(&format!("Drawn by `{COMMAND}`")).count(), 8);
    assert_eq!(text.matches(&format!("Measured by `{}`", diagnosis.command)).count(), 8);
    assert!(text.trim_end().lines().next_back().unwrap().starts_with("<!-- made by headq "));
}

#[test]
fn plots_are_replaced_by_their_data() {
    let text = markdown(&[diagnosed("usual", SMALL)], COMMAND);
    for data in [
        "| `query-pca` | 51.5 % | 66.6 % |",
        "| index | 25 % quantile | median | 75 % quantile |",
        "| entropy, nats | queries |",
        "| 4 – ∞ | 812 |",
        "| `grid-3(g=32,r=32,center)` | 1.75 |",
        "| layer | kivi-2(g=32,r=32) |",
        "| `rotated-5(g=32,r=32)` | `rotated` | 5 | 6.0000 | 90 |",
    ] {
        assert!(text.replace('\u{a0}', " ").contains(data), "{data}");
    }
}

#[test]
fn names_are_text_whatever_they_hold() {
    let (_, run) = extremes().into_iter().find(|(name, _)| *name == "long-names").unwrap();
    let text = markdown(&[run], COMMAND);
    // Outside code spans a name starts no element, and nowhere a link.
    assert!(
        text.lines()
            .filter(|line| line.starts_with('#'))
            .all(|line| !line.contains("`*") || line.contains("\\`\\*\\_"))
    );
    assert!(text.starts_with("# verylongfoldername") && text.contains("\\<script>"));
}
