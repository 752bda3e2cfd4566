//! What a report says, apart from how it is written down.

use headq_lab::diagnose::data::Verdict;

use crate::format;
use crate::plot::{Key, Plot};

/// A run of text in one style.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Span {
    /// Plain.
    Plain(String),
    /// A scheme, a command, a name of the program.
    Code(String),
    /// Stressed.
    Strong(String),
}

/// A line of text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Text(pub Vec<Span>);

impl Text {
    /// A scheme, a command, a name of the program.
    pub fn code(text: impl Into<String>) -> Self {
        Self(vec![Span::Code(text.into())])
    }

    /// Stressed.
    pub fn strong(text: impl Into<String>) -> Self {
        Self(vec![Span::Strong(text.into())])
    }

    /// Whether it is too long to stand on one line of a cell.
    pub fn is_long(&self) -> bool {
        const LONG: usize = 26;
        let characters = |span: &Span| match span {
            Span::Plain(text) | Span::Code(text) | Span::Strong(text) => text.chars().count(),
        };
        self.0.iter().map(characters).sum::<usize>() > LONG
    }

    /// With plain text after it.
    pub fn then(mut self, text: impl Into<String>) -> Self {
        self.0.push(Span::Plain(text.into()));
        self
    }

    /// With code after it.
    pub fn then_code(mut self, text: impl Into<String>) -> Self {
        self.0.push(Span::Code(text.into()));
        self
    }
}

impl<T: Into<String>> From<T> for Text {
    fn from(text: T) -> Self {
        Self(vec![Span::Plain(text.into())])
    }
}

/// How the cells of a column are set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Align {
    /// Text.
    Left,
    /// Numbers.
    Right,
    /// Signs.
    Center,
}

/// A cell of a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cell {
    /// Text or a number.
    Text(Text),
    /// A verdict, or none where the link was not taken.
    Verdict(Option<Verdict>),
}

impl<T: Into<Text>> From<T> for Cell {
    fn from(text: T) -> Self {
        Cell::Text(text.into())
    }
}

/// A column: title, alignment, and what it shows of a row.
pub type Column<T> = (&'static str, Align, fn(&T) -> Cell);

/// Rows that belong together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// Title, where there is more than one group.
    pub title: Option<String>,
    /// Cells by column.
    pub rows: Vec<Vec<Cell>>,
}

/// A table. The first cell of a row names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    /// What it shows, with the units.
    pub caption: Text,
    /// Titles and alignments.
    pub columns: Vec<(String, Align)>,
    /// Rows.
    pub groups: Vec<Group>,
}

impl Table {
    /// A table without rows.
    pub fn new(caption: impl Into<Text>, columns: Vec<(String, Align)>) -> Self {
        Self { caption: caption.into(), columns, groups: Vec::new() }
    }

    /// One row for each item.
    pub fn of<T>(caption: impl Into<Text>, columns: &[Column<T>], items: &[T]) -> Self {
        Self::grouped(caption, columns, vec![(None, items.iter().collect())])
    }

    /// One row for each item of each group; groups without items are left out.
    pub fn grouped<T>(caption: impl Into<Text>, columns: &[Column<T>], groups: Vec<(Option<String>, Vec<&T>)>) -> Self {
        let row = |item: &T| columns.iter().map(|(_, _, show)| show(item)).collect();
        let mut table =
            Self::new(caption, columns.iter().map(|(title, align, _)| (title.to_string(), *align)).collect());
        for (title, items) in groups.into_iter().filter(|(_, items)| !items.is_empty()) {
            table.groups.push(Group { title, rows: items.into_iter().map(row).collect() });
        }
        table
    }

    /// A table from rows.
    pub fn from_rows(caption: impl Into<Text>, columns: Vec<(String, Align)>, rows: Vec<Vec<Cell>>) -> Self {
        let mut table = Self::new(caption, columns);
        table.groups.push(Group { title: None, rows });
        table
    }

    /// Whether it has no rows.
    pub fn is_empty(&self) -> bool {
        self.groups.iter().all(|group| group.rows.is_empty())
    }

    /// With the columns of another table, of the same rows, to the right.
    pub fn beside(mut self, other: Table) -> Self {
        self.columns.extend(other.columns);
        let others = other.groups.into_iter().flat_map(|group| group.rows);
        for (row, right) in self.groups.iter_mut().flat_map(|group| &mut group.rows).zip(others) {
            row.extend(right);
        }
        self
    }

    /// Without the columns that show nothing, or nothing but zeros, in every row.
    pub fn without_idle_columns(mut self) -> Self {
        let idle = |cell: &Cell| *cell == format::NONE.into() || *cell == "0".into();
        let used: Vec<bool> = (0..self.columns.len())
            .map(|i| self.groups.iter().flat_map(|g| &g.rows).any(|row| row.get(i).is_some_and(|cell| !idle(cell))))
            .collect();
        let mut keep = used.iter();
        self.columns.retain(|_| *keep.next().unwrap_or(&true));
        for row in self.groups.iter_mut().flat_map(|group| &mut group.rows) {
            let mut keep = used.iter();
            row.retain(|_| *keep.next().unwrap_or(&true));
        }
        self
    }
}

/// Where the data of a figure come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    /// Model, text, tokens, context and seed.
    pub measured: Text,
    /// The command that measures, where the run records it.
    pub command: Option<String>,
    /// The command that draws.
    pub report: String,
}

impl Source {
    /// What was done by which command: measuring and drawing, or both by one.
    pub fn commands(&self) -> Vec<(&'static str, &str)> {
        let drawn = self.report.as_str();
        match self.command.as_deref() {
            None => vec![("Drawn", drawn)],
            Some(measured) if measured == drawn => vec![("Measured and drawn", drawn)],
            Some(measured) => vec![("Measured", measured), ("Drawn", drawn)],
        }
    }
}

/// One plot of a figure.
pub struct Panel {
    /// Title, where a figure has several.
    pub title: Option<Text>,
    /// What is to be seen, for those who do not see it.
    pub label: String,
    /// The plot.
    pub plot: Box<dyn Plot>,
}

/// Plots with a legend, a caption and their data.
pub struct Figure {
    /// What is drawn, with the units.
    pub title: String,
    /// Further remarks.
    pub notes: Vec<String>,
    /// Plots.
    pub panels: Vec<Panel>,
    /// Signs and their meaning.
    pub legend: Vec<(Key, Text)>,
    /// Provenance.
    pub source: Source,
    /// The data, in place of the plots; none where a table that stands beside the figure has them.
    pub data: Vec<Table>,
}

/// A number that sums up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyNumber {
    /// What it is.
    pub name: &'static str,
    /// The number.
    pub value: String,
    /// What to read it against.
    pub detail: Text,
}

/// A part of a section.
pub enum Block {
    /// Text.
    Paragraph(Text),
    /// A verdict with its grounds.
    Judgement {
        /// The verdict.
        verdict: Verdict,
        /// What decides it.
        because: String,
        /// What would change it.
        would_change: String,
    },
    /// The links with their verdicts, by their place in the chain.
    Chain(Vec<Option<Verdict>>),
    /// Numbers that sum up.
    KeyNumbers(Vec<KeyNumber>),
    /// A table.
    Table(Table),
    /// A figure.
    Figure(Figure),
}

/// Blocks of one run.
pub struct Pane {
    /// Name of the run, where there are several.
    pub run: Option<String>,
    /// Blocks.
    pub blocks: Vec<Block>,
}

/// A section.
pub struct Section {
    /// Name in links.
    pub id: &'static str,
    /// Title.
    pub title: String,
    /// A sentence below the title.
    pub claim: Option<String>,
    /// By run; one without a name where they are taken together.
    pub panes: Vec<Pane>,
}

/// A report.
pub struct Document {
    /// Title.
    pub title: String,
    /// What was measured, in a line.
    pub subtitle: Text,
    /// Sections.
    pub sections: Vec<Section>,
    /// What to believe.
    pub footer: Vec<Text>,
}
