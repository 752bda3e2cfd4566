//! A report as HTML.

use headq_lab::PROGRAM;
use headq_lab::diagnose::data::{LINKS, Verdict};
use maud::{DOCTYPE, Markup, PreEscaped, Render, html};

use crate::document::{
    Align, Block, Cell, Document, Figure, Group, KeyNumber, Pane, Panel, Section, Span, Table, Text,
};
use crate::format;
use crate::plot::Width;
use crate::theme;

/// Layout of the page; colours come from [`theme::css`].
const STYLE: &str = include_str!("style.css");

/// From more columns than this on, a table is set more tightly.
const MANY_COLUMNS: usize = 12;

/// The whole document.
pub fn render(document: &Document) -> String {
    let mut page = Page::default();
    let body = page.body(document);
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="generator" content=(PROGRAM);
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                title { (document.title) " · HeadQ report" }
                style { (PreEscaped(theme::css())) (PreEscaped(STYLE)) }
            }
            (body)
        }
    };
    let mut text = page.into_string();
    text.push('\n');
    text
}

/// The sign of a verdict, or of none.
pub fn verdict_sign(verdict: Option<Verdict>) -> &'static str {
    match verdict {
        Some(Verdict::Supported) => "✓",
        Some(Verdict::NotSupported) => "✗",
        Some(Verdict::Inconclusive) => "?",
        None => format::NONE,
    }
}

/// Name of a verdict's style.
fn verdict_class(verdict: Option<Verdict>) -> &'static str {
    match verdict {
        Some(Verdict::Supported) => "supported",
        Some(Verdict::NotSupported) => "not-supported",
        Some(Verdict::Inconclusive) => "inconclusive",
        None => "not-taken",
    }
}

fn verdict_name(verdict: Option<Verdict>) -> &'static str {
    verdict.map_or("not taken", Verdict::name)
}

/// A verdict with its sign, colour and name.
fn badge(verdict: Option<Verdict>) -> Markup {
    html! {
        span class={ "badge " (verdict_class(verdict)) } {
            span.sign aria-hidden="true" { (verdict_sign(verdict)) } " " (verdict_name(verdict))
        }
    }
}

impl Render for Text {
    fn render(&self) -> Markup {
        html! {
            @for span in &self.0 {
                @match span {
                    Span::Plain(text) => (text),
                    Span::Code(text) => (code(text)),
                    Span::Strong(text) => strong { (text) },
                }
            }
        }
    }
}

/// Code, which may break before the parts of a scheme or path.
fn code(text: &str) -> Markup {
    let breaks = |c: char| matches!(c, '+' | '/' | '(');
    let mut parts = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.char_indices().skip(1).find(|(_, c)| breaks(*c)).map(|(at, _)| at) {
        parts.push(&rest[..at]);
        rest = &rest[at..];
    }
    html! {
        code { @for part in parts { (part) wbr; } (rest) }
    }
}

/// Writes a page, and counts its tables and figures.
#[derive(Default)]
struct Page {
    tables: usize,
    figures: usize,
}

impl Page {
    fn body(&mut self, document: &Document) -> Markup {
        html! {
            body {
                header {
                    p.kind { "HeadQ report" }
                    h1 { (document.title) }
                    p.subtitle { (document.subtitle) }
                }
                main {
                    @for section in &document.sections { (self.section(section)) }
                }
                footer {
                    @for line in &document.footer { p { (line) } }
                }
            }
        }
    }

    fn section(&mut self, section: &Section) -> Markup {
        html! {
            section id=(section.id) {
                h2 { (section.title) }
                @if let Some(claim) = &section.claim { p.claim { (claim) } }
                div.panes {
                    @for pane in &section.panes { (self.pane(pane)) }
                }
            }
        }
    }

    fn pane(&mut self, pane: &Pane) -> Markup {
        html! {
            div.pane {
                @if let Some(run) = &pane.run { h3 { (run) } }
                @for block in &pane.blocks { (self.block(block)) }
            }
        }
    }

    fn block(&mut self, block: &Block) -> Markup {
        match block {
            Block::Paragraph(text) => html! { p { (text) } },
            Block::Judgement { verdict, because, would_change } => html! {
                div class={ "judgement " (verdict_class(Some(*verdict))) } {
                    p { (badge(Some(*verdict))) }
                    p { (because) }
                    p.change { strong { "What would change it. " } (would_change) }
                }
            },
            Block::Chain(verdicts) => chain(verdicts),
            Block::KeyNumbers(numbers) => key_numbers(numbers),
            Block::Table(table) => {
                self.tables += 1;
                let caption = html! { strong { "Table " (self.tables) ". " } (table.caption) };
                scrolling(table, &caption)
            }
            Block::Figure(figure) => self.figure(figure),
        }
    }

    fn figure(&mut self, figure: &Figure) -> Markup {
        self.figures += 1;
        let number = self.figures;
        html! {
            figure {
                @match figure.panels.as_slice() {
                    [one] => div.panels { (panel(one, &[Width::Wide, Width::Narrow])) },
                    several => div.panels.several { @for one in several { (panel(one, &[Width::Narrow])) } },
                }
                @if !figure.legend.is_empty() {
                    ul.legend {
                        @for (key, meaning) in &figure.legend { li { (PreEscaped(key.draw())) " " span { (meaning) } } }
                    }
                }
                figcaption {
                    p {
                        strong { "Figure " (number) ". " } (figure.title)
                        @for note in &figure.notes { " " (note) }
                    }
                    p.source {
                        (figure.source.measured)
                        @for (done, command) in figure.source.commands() { " " (done) " by " (code(command)) "." }
                    }
                }
                @for table in &figure.data {
                    details {
                        summary { "Data of figure " (number) }
                        (scrolling(table, &table.caption.render()))
                    }
                }
            }
        }
    }
}

/// A plot at these widths, of which the page shows one.
fn panel(panel: &Panel, widths: &[Width]) -> Markup {
    let class = |width: Width| match (widths.len(), width) {
        (1, _) => "any",
        (_, Width::Wide) => "wide",
        (_, Width::Narrow) => "narrow",
    };
    html! {
        div.panel {
            @if let Some(title) = &panel.title { p.title { (title) } }
            @for width in widths {
                div class=(class(*width)) { (PreEscaped(panel.plot.draw(*width, &panel.label))) }
            }
        }
    }
}

fn chain(verdicts: &[Option<Verdict>]) -> Markup {
    html! {
        ol.chain {
            @for (i, ((id, title, claim), verdict)) in LINKS.iter().zip(verdicts).enumerate() {
                li class=(verdict_class(*verdict)) {
                    a href={ "#" (id) } title=(claim) {
                        span.link { span.number { (i + 1) } " " (title) }
                        (badge(*verdict))
                    }
                }
            }
        }
    }
}

fn key_numbers(numbers: &[KeyNumber]) -> Markup {
    html! {
        dl.key-numbers {
            @for number in numbers {
                div {
                    dt { (number.name) }
                    dd.value { (number.value) }
                    dd.detail { (number.detail) }
                }
            }
        }
    }
}

/// A table that scrolls where it is wider than the page, also by keyboard.
fn scrolling(table: &Table, caption: &Markup) -> Markup {
    let classes: Vec<&str> = table.columns.iter().map(|(_, align)| align_class(*align)).collect();
    html! {
        div.scroll tabindex="0" {
            table.dense[table.columns.len() > MANY_COLUMNS] {
                // Stays in view where the table scrolls.
                caption { span.held { (caption) } }
                thead {
                    tr {
                        @for ((title, _), class) in table.columns.iter().zip(&classes) {
                            th scope="col" class={ (class) (long(&Text::from(title))) } { (title) }
                        }
                    }
                }
                @for group in &table.groups { (rows(group, &classes)) }
            }
        }
    }
}

/// Marks what may be broken into lines.
fn long(text: &Text) -> &'static str {
    if text.is_long() { " long" } else { "" }
}

fn long_cell(cell: &Cell) -> &'static str {
    match cell {
        Cell::Text(text) => long(text),
        Cell::Verdict(_) => "",
    }
}

fn rows(group: &Group, classes: &[&str]) -> Markup {
    html! {
        tbody {
            @if let Some(title) = &group.title {
                tr.group { th scope="rowgroup" colspan=(classes.len()) { span { (title) } } }
            }
            @for row in &group.rows {
                tr {
                    @for (i, (content, class)) in row.iter().zip(classes).enumerate() {
                        @if i == 0 { th scope="row" class={ (class) (long_cell(content)) } { (content) } }
                        @else { td class={ (class) (long_cell(content)) } { (content) } }
                    }
                }
            }
        }
    }
}

fn align_class(align: Align) -> &'static str {
    match align {
        Align::Left => "left",
        Align::Right => "right",
        Align::Center => "center",
    }
}

impl Render for Cell {
    fn render(&self) -> Markup {
        match self {
            Cell::Text(text) => text.render(),
            Cell::Verdict(verdict) => html! {
                span class={ "mark " (verdict_class(*verdict)) } role="img" aria-label=(verdict_name(*verdict))
                    title=(verdict_name(*verdict)) { (verdict_sign(*verdict)) }
            },
        }
    }
}
