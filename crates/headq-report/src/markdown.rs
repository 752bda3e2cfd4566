//! A report as Markdown.

use std::fmt::Write;

use headq_lab::diagnose::data::LINKS;

use crate::document::{Align, Block, Cell, Document, Figure, Pane, Span, Table, Text};
use crate::format;
use crate::html::verdict_sign;
use crate::output::markdown_mark;

/// The whole document.
pub fn render(document: &Document) -> String {
    let mut writer = Writer::default();
    writer.block(&format!("# {}", escape(&document.title)));
    writer.block(&text(&document.subtitle));
    for section in &document.sections {
        writer.block(&format!("## {}", escape(&section.title)));
        if let Some(claim) = &section.claim {
            writer.block(&format!("*{}*", escape(claim)));
        }
        section.panes.iter().for_each(|pane| writer.pane(pane));
    }
    writer.block("---");
    document.footer.iter().for_each(|line| writer.block(&text(line)));
    writer.text += &markdown_mark();
    writer.text.push('\n');
    writer.text
}

#[derive(Default)]
struct Writer {
    text: String,
    tables: usize,
    figures: usize,
}

impl Writer {
    /// A block, with an empty line after it.
    fn block(&mut self, block: &str) {
        self.text += block;
        self.text += "\n\n";
    }

    fn pane(&mut self, pane: &Pane) {
        if let Some(run) = &pane.run {
            self.block(&format!("### {}", escape(run)));
        }
        for block in &pane.blocks {
            match block {
                Block::Paragraph(line) => self.block(&text(line)),
                Block::Judgement { verdict, because, would_change } => {
                    let sign = verdict_sign(Some(*verdict));
                    self.block(&format!("**{sign} {verdict}.** {}", escape(because)));
                    self.block(&format!("What would change it: {}", escape(would_change)));
                }
                Block::Chain(verdicts) => {
                    let lines = LINKS.iter().zip(verdicts).enumerate().map(|(i, ((_, title, claim), verdict))| {
                        let cells = [format!("{}. {title}", i + 1), claim.to_string()].map(Cell::from);
                        cells.into_iter().chain([Cell::Verdict(*verdict)]).collect()
                    });
                    let columns = ["link", "claim", "verdict"].map(|title| (title.to_string(), Align::Left));
                    self.rows(&Table::from_rows("", columns.to_vec(), lines.collect()));
                }
                Block::KeyNumbers(numbers) => {
                    let lines: Vec<String> = numbers
                        .iter()
                        .map(|n| format!("- {}: **{}** ({})", escape(n.name), escape(&n.value), text(&n.detail)))
                        .collect();
                    self.block(&lines.join("\n"));
                }
                Block::Table(table) => self.table(table),
                Block::Figure(figure) => self.figure(figure),
            }
        }
    }

    fn table(&mut self, table: &Table) {
        self.tables += 1;
        self.block(&format!("**Table {}.** {}", self.tables, text(&table.caption)));
        self.rows(table);
    }

    /// A figure is its caption and its data.
    fn figure(&mut self, figure: &Figure) {
        self.figures += 1;
        let mut caption = format!("**Figure {}.** {}", self.figures, escape(&figure.title));
        figure.notes.iter().for_each(|note| write!(caption, " {}", escape(note)).expect("a string takes any text"));
        self.block(&caption);
        let source = &figure.source;
        let mut provenance = text(&source.measured);
        for (done, command) in source.commands() {
            write!(provenance, " {done} by {}.", code(command)).expect("a string takes any text");
        }
        self.block(&provenance);
        for table in &figure.data {
            self.block(&text(&table.caption));
            self.rows(table);
        }
    }

    fn rows(&mut self, table: &Table) {
        let titles: Vec<String> = table.columns.iter().map(|(title, _)| escape(title)).collect();
        let rules: Vec<&str> = table.columns.iter().map(|(_, align)| rule(*align)).collect();
        let mut lines = vec![line(&titles), format!("|{}|", rules.join("|"))];
        for group in &table.groups {
            if let Some(title) = &group.title {
                let mut cells = vec![String::new(); titles.len()];
                cells[0] = format!("**{}**", escape(title));
                lines.push(line(&cells));
            }
            lines.extend(group.rows.iter().map(|row| line(&row.iter().map(cell).collect::<Vec<_>>())));
        }
        self.block(&lines.join("\n"));
    }
}

fn rule(align: Align) -> &'static str {
    match align {
        Align::Left => "---",
        Align::Right => "---:",
        Align::Center => ":---:",
    }
}

fn line(cells: &[String]) -> String {
    format!("| {} |", cells.join(" | "))
}

fn cell(cell: &Cell) -> String {
    match cell {
        Cell::Text(content) => text(content),
        Cell::Verdict(None) => format::NONE.into(),
        Cell::Verdict(verdict @ Some(v)) => format!("{} {v}", verdict_sign(*verdict)),
    }
}

fn text(text: &Text) -> String {
    let span = |span: &Span| match span {
        Span::Plain(plain) => escape(plain),
        Span::Code(content) => code(content),
        Span::Strong(content) => format!("**{}**", escape(content)),
    };
    text.0.iter().map(span).collect()
}

/// Text that Markdown takes for nothing else. Line ends become spaces, since every piece of text stands on one line.
fn escape(text: &str) -> String {
    let text = one_line(text);
    let mut escaped = String::with_capacity(text.len());
    let mut characters = text.chars().peekable();
    while let Some(c) = characters.next() {
        // Brackets mean something only before a target or a definition; an interval has none.
        let link = c == ']' && matches!(characters.peek(), Some('(' | '[' | ':'));
        if link || matches!(c, '\\' | '`' | '*' | '_' | '<' | '|' | '&' | '~') {
            escaped.push('\\');
        }
        escaped.push(c);
    }
    escaped
}

/// Code, also where it holds backticks. A vertical bar would end a cell of a table even in code, unless it is escaped there.
fn code(content: &str) -> String {
    let content = one_line(content).replace('|', "\\|");
    let longest = content.split(|c| c != '`').map(str::len).max().unwrap_or(0);
    let fence = "`".repeat(longest + 1);
    match longest {
        0 => format!("{fence}{content}{fence}"),
        _ => format!("{fence} {content} {fence}"),
    }
}

fn one_line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn special_characters() {
        assert_eq!(escape("a_b*c|d<e>\nf"), "a\\_b\\*c\\|d\\<e> f");
        assert_eq!(escape("0.5 [0.4, 0.6] [a](b)"), "0.5 [0.4, 0.6] [a\\](b)");
        assert_eq!(code("a|b"), "`a\\|b`");
        assert_eq!(code("a``b`"), "``` a``b` ```");
    }
}
