//! What a report says of its runs: the sections, in order.

mod bases;
mod columns;
mod comparison;
mod counterexamples;
mod direction;
mod finetuning;
mod headline;
mod metric;
mod null_space;
mod perplexity;
mod provenance;
mod route_flips;
mod selection;
mod summary;
pub mod sweep;

use headq_lab::PROGRAM;
use headq_lab::diagnose::data::{Diagnosis, Judgement, LINKS};

use crate::Run;
use crate::document::{Block, Document, Pane, Section, Source, Table, Text};

/// The numbers and figures of one link, or none where it was not taken.
type Link = fn(&Diagnosis, &Source) -> Option<Vec<Block>>;

/// Links by their place in [`LINKS`].
const CONTENT: [Link; 7] = [
    metric::blocks,
    counterexamples::blocks,
    null_space::blocks,
    bases::blocks,
    direction::blocks,
    route_flips::blocks,
    perplexity::blocks,
];

/// The report of these runs, made by `command`.
pub fn document(runs: &[Run], command: &str) -> Document {
    let names = names(runs);
    let label = |i: usize| (runs.len() > 1).then(|| names[i].clone());
    let panes = |blocks: &dyn Fn(&Run) -> Option<Vec<Block>>| -> Vec<Pane> {
        let of = |(i, run)| blocks(run).map(|blocks| Pane { run: label(i), blocks });
        runs.iter().enumerate().filter_map(of).collect()
    };
    let mut sections = vec![summary::section(runs, &names)];
    if runs.iter().any(|run| run.diagnosis.is_some()) {
        for (i, (id, title, claim)) in LINKS.into_iter().enumerate() {
            let panes = panes(&|run| run.diagnosis.as_ref().map(|d| link(i, d, &provenance::of_diagnosis(d, command))));
            sections.push(Section { id, title: format!("{} {title}", i + 1), claim: Some(claim.into()), panes });
        }
    }
    let trained = panes(&|run| finetuning::blocks(&run.finetunings, command));
    let claim = Some("Held-out windows decide which parameters of each head are kept.".to_string());
    sections.push(Section { id: "finetuning", title: "Fine-tuning".into(), claim, panes: trained });
    let evaluated = panes(&|run| {
        run.evaluation.as_ref().map(|e| perplexity::evaluation(e, &provenance::of_evaluation(e, command)))
    });
    let provenance = panes(&|run| Some(provenance::blocks(run)));
    sections.push(Section { id: "evaluation", title: "Evaluation".into(), claim: None, panes: evaluated });
    let compared = panes(&|run| run.comparison.as_ref().map(|c| comparison::blocks(c, command)));
    sections.push(Section { id: "comparison", title: "Comparison".into(), claim: None, panes: compared });
    let swept = panes(&|run| run.sweep.as_ref().map(|s| sweep::blocks(s, &provenance::of_sweep(s, command))));
    sections.push(Section { id: "sweep", title: "Sweep".into(), claim: None, panes: swept });
    let meanings = vec![Pane { run: None, blocks: vec![Block::Table(columns::meanings())] }];
    sections.push(Section { id: "columns", title: "Columns".into(), claim: None, panes: meanings });
    sections.push(Section { id: "provenance", title: "Provenance".into(), claim: None, panes: provenance });
    sections.retain(|section| !section.panes.is_empty());
    Document { title: title(&names), subtitle: summary::subtitle(runs), sections, footer: footer(command) }
}

/// One link of one run: the verdict, then the grounds.
fn link(i: usize, diagnosis: &Diagnosis, source: &Source) -> Vec<Block> {
    let blocks = CONTENT[i](diagnosis, source);
    let judgement = diagnosis.judgements()[i].map(judgement);
    match (judgement, blocks) {
        (Some(judgement), Some(blocks)) => {
            [judgement].into_iter().chain(blocks).filter(|block| !is_empty(block)).collect()
        }
        _ => vec![Block::Paragraph("This link was not taken in this run.".into())],
    }
}

/// Whether there is nothing to show.
fn is_empty(block: &Block) -> bool {
    match block {
        Block::Table(table) => table.is_empty(),
        Block::Figure(figure) => !figure.data.is_empty() && figure.data.iter().all(Table::is_empty),
        _ => false,
    }
}

fn judgement(judgement: &Judgement) -> Block {
    Block::Judgement {
        verdict: judgement.verdict,
        because: judgement.because.clone(),
        would_change: judgement.would_change.clone(),
    }
}

/// Names of the runs; where several have one name, they are numbered.
fn names(runs: &[Run]) -> Vec<String> {
    let numbered = |(i, run): (usize, &Run)| {
        let same = |other: &&Run| other.name == run.name;
        match runs.iter().filter(same).count() {
            1 => run.name.clone(),
            _ => format!("{} ({})", run.name, runs[..=i].iter().filter(same).count()),
        }
    };
    runs.iter().enumerate().map(numbered).collect()
}

fn title(names: &[String]) -> String {
    match names {
        [] => "No runs".into(),
        [name] => name.clone(),
        several => format!("{} runs side by side", several.len()),
    }
}

/// What to believe, and what made the report.
fn footer(command: &str) -> Vec<Text> {
    vec![
        Text::strong("Verdicts are about this model and this text only").then(
            ": another model, text, context or quantizer can give others. Intervals say how far the numbers would move with other \
             windows or heads of the same kind, not with other models.",
        ),
        "The method comes from HeadQ (arXiv:2605.03562), which its author withdrew in May 2026. Its numbers are hypotheses; none of \
         them is repeated here, and every number above was measured by the command beside it."
            .into(),
        Text::from(format!("Made by {PROGRAM}: ")).then_code(command),
    ]
}
