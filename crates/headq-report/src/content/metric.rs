//! Link 1: what ranks quantizers.

use headq_lab::diagnose::data::{Correlation, Diagnosis, Metric, Selection, SelectionRival, Setting};

use super::columns::{bits, interval, number, scheme};
use crate::document::{Align, Block, Cell, Column, Figure, Panel, Source, Table, Text};
use crate::format::{self, count, maybe, percent, plural, rho};
use crate::plot::Key;
use crate::plot::scatter::{MOST, Point, Scatter, sample};

pub fn blocks(diagnosis: &Diagnosis, source: &Source) -> Option<Vec<Block>> {
    let metric = diagnosis.metric.as_ref()?;
    let resampled = format!(
        "Intervals: {} % of {}, resampling {}.",
        format::tick(100.0 * diagnosis.thresholds.confidence),
        plural(metric.replicates, "bootstrap replicate"),
        metric.resampled
    );
    let mut blocks = vec![Block::Table(correlations(metric, &resampled)), Block::Figure(keys(metric, source))];
    if !metric.values.is_empty() {
        blocks.push(Block::Table(value_correlations(metric, &resampled)));
    }
    if !metric.value_points.is_empty() {
        blocks.push(Block::Figure(values(metric, source)));
    }
    if !metric.selection.is_empty() {
        blocks.extend(metric.selection.iter().map(|selection| Block::Paragraph(reading(selection))));
        blocks.push(Block::Table(selection(&metric.selection)));
    }
    Some(blocks)
}

const CORRELATION: &[Column<Correlation>] = &[
    ("points of", Align::Left, |c| Text::code(&c.group).into()),
    ("points", Align::Right, |c| count(c.points as u64).into()),
    ("ρ storage MSE", Align::Right, |c| interval(c.storage, rho)),
    ("ρ Fisher error", Align::Right, |c| interval(c.operator, rho)),
    ("difference", Align::Right, |c| interval(c.difference, rho)),
];

fn correlations(metric: &Metric, resampled: &str) -> Table {
    let caption =
        format!("Spearman's ρ of storage MSE (E4) and of Fisher error (E2) with attention KL (E3). {resampled}");
    let groups = vec![
        (None, metric.keys.iter().collect()),
        (Some("KL shuffled among the points: what chance gives".into()), vec![&metric.shuffled]),
    ];
    Table::grouped(caption, CORRELATION, groups)
}

fn value_correlations(metric: &Metric, resampled: &str) -> Table {
    let caption =
        format!("Spearman's ρ of storage MSE (E4) and of A² (E6) with the readout error of values (E5). {resampled}");
    let mut table = Table::of(caption, CORRELATION, &metric.values);
    table.columns[3].0 = "ρ A²".into();
    table
}

/// A point of either scatter, with its setting.
struct Measured {
    setting: usize,
    storage: f64,
    operator: f64,
    target: f64,
}

/// Names of the quantizers, in order of appearance: a series each.
fn quantizers(settings: &[Setting]) -> Vec<&str> {
    let mut names: Vec<&str> = Vec::new();
    for setting in settings {
        if !names.contains(&setting.quantizer.as_str()) {
            names.push(&setting.quantizer);
        }
    }
    names
}

/// Two panels, of one target against each of two predictors.
struct Scatters<'a> {
    title: &'static str,
    settings: &'a [Setting],
    points: Vec<Measured>,
    pooled: Option<&'a Correlation>,
    operator: &'static str,
    storage: &'static str,
    target: &'static str,
    /// Whether the operator's metric and the target are the same quantity.
    diagonal: bool,
    data: Table,
}

impl Scatters<'_> {
    fn figure(self, source: &Source) -> Figure {
        let names = quantizers(self.settings);
        let series = |setting: usize| {
            let quantizer = self.settings.get(setting).map(|s| s.quantizer.as_str());
            names.iter().position(|name| Some(*name) == quantizer).unwrap_or(names.len())
        };
        let drawn = sample(&self.points.iter().collect::<Vec<_>>());
        let panel = |x_title: &'static str, x: fn(&Measured) -> f64, rho: Option<f64>, diagonal: bool| Panel {
            title: Some(format!("{} against {x_title} (ρ = {})", self.target, maybe(rho, format::rho)).into()),
            label: format!("Scatter of {} against {x_title}, {}", self.target, plural(drawn.len(), "point")),
            plot: Box::new(Scatter {
                points: drawn.iter().map(|p| Point { x: x(p), y: p.target, series: series(p.setting) }).collect(),
                x_title,
                y_title: self.target,
                diagonal,
            }),
        };
        let estimate = |of: fn(&Correlation) -> Option<headq_lab::diagnose::data::Interval>| {
            self.pooled.and_then(of).map(|i| i.estimate)
        };
        let panels = vec![
            panel(self.operator, |p| p.operator, estimate(|c| c.operator), self.diagonal),
            panel(self.storage, |p| p.storage, estimate(|c| c.storage), false),
        ];
        let mut legend: Vec<(Key, Text)> =
            names.iter().enumerate().map(|(i, name)| (Key::Marker(i), Text::code(*name))).collect();
        if self.diagonal {
            legend.push((Key::Reference, "equality".into()));
        }
        Figure {
            title: self.title.into(),
            notes: notes(&self.points),
            panels,
            legend,
            source: source.clone(),
            data: vec![self.data],
        }
    }
}

fn notes(points: &[Measured]) -> Vec<String> {
    let mut notes =
        vec!["Each point is one KV head of one layer under one setting; all axes are logarithmic.".to_string()];
    if points.len() > MOST {
        notes.push(format!("Drawn are {} of {}, chosen evenly.", count(MOST as u64), plural(points.len(), "point")));
    }
    if points.iter().any(|p| [p.storage, p.operator, p.target].iter().any(|v| *v <= 0.0)) {
        notes.push("Zeros are drawn at the lower end.".into());
    }
    notes
}

fn keys(metric: &Metric, source: &Source) -> Figure {
    let values: &[(&str, fn(&headq_lab::diagnose::data::KeyPoint) -> f64)] = &[
        ("MSE (E4)", |p| p.mse),
        ("Fisher, nats (E2)", |p| p.fisher),
        ("KL, nats (E3)", |p| p.kl),
        ("output error (E7)", |p| p.output_error),
    ];
    Scatters {
        title: "Attention KL against Fisher error and against storage MSE.",
        settings: &metric.settings,
        points: metric
            .points
            .iter()
            .map(|p| Measured { setting: p.setting, storage: p.mse, operator: p.fisher, target: p.kl })
            .collect(),
        pooled: metric.keys.first(),
        operator: "Fisher error, nats",
        storage: "storage MSE",
        target: "KL, nats",
        diagonal: true,
        data: medians(&metric.settings, &metric.points, |p| p.setting, values),
    }
    .figure(source)
}

fn values(metric: &Metric, source: &Source) -> Figure {
    let values: &[(&str, fn(&headq_lab::diagnose::data::ValuePoint) -> f64)] =
        &[("MSE (E4)", |p| p.mse), ("A² (E6)", |p| p.a2), ("readout error (E5)", |p| p.readout)];
    Scatters {
        title: "Readout error of values against A² and against storage MSE.",
        settings: &metric.value_settings,
        points: metric
            .value_points
            .iter()
            .map(|p| Measured { setting: p.setting, storage: p.mse, operator: p.a2, target: p.readout })
            .collect(),
        pooled: metric.values.first(),
        operator: "A²",
        storage: "storage MSE",
        target: "readout error",
        diagonal: true,
        data: medians(&metric.value_settings, &metric.value_points, |p| p.setting, values),
    }
    .figure(source)
}

/// The settings, each with the medians over its points.
fn medians<P>(settings: &[Setting], points: &[P], setting: fn(&P) -> usize, values: &[(&str, fn(&P) -> f64)]) -> Table {
    const SETTING: &[Column<Setting>] = &[
        ("setting", Align::Left, |s| scheme(&s.scheme)),
        ("quantizer", Align::Left, |s| Text::code(&s.quantizer).into()),
        ("bits", Align::Right, |s| s.bits.to_string().into()),
        ("code bits", Align::Right, |s| bits(s.code_bits)),
    ];
    let columns = std::iter::once("points").chain(values.iter().map(|(title, _)| *title));
    let row = |i: usize| -> Vec<Cell> {
        let own: Vec<&P> = points.iter().filter(|p| setting(p) == i).collect();
        let of = |value: &fn(&P) -> f64| number(median(own.iter().map(|p| value(p)).collect()));
        let medians = values.iter().map(|(_, value)| of(value));
        std::iter::once(count(own.len() as u64).into()).chain(medians).collect()
    };
    let right = Table::from_rows(
        "",
        columns.map(|title| (title.to_string(), Align::Right)).collect(),
        (0..settings.len()).map(row).collect(),
    );
    Table::of("Medians over the heads of each setting; every point is in diagnosis.json.", SETTING, settings)
        .beside(right)
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.retain(|v| v.is_finite());
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => None,
        n if n % 2 == 1 => Some(values[n / 2]),
        n => Some(0.5 * values[n / 2 - 1] + 0.5 * values[n / 2]),
    }
}

/// What a comparison with `a2` says.
fn outcome(rival: &SelectionRival) -> &'static str {
    match rival.log_ratio {
        Some(i) if i.low > 0.0 => "a2 is better",
        Some(i) if i.high < 0.0 => "a2 is worse",
        Some(_) => "undecided",
        None => "not defined",
    }
}

/// Whether `a2` wins at one number of bits, in a sentence.
fn reading(selection: &Selection) -> Text {
    let with = |wanted: &str| -> Vec<&str> {
        selection.others.iter().filter(|r| outcome(r) == wanted).map(|r| r.policy.as_str()).collect()
    };
    let (better, worse) = (with("a2 is better"), with("a2 is worse"));
    let open: Vec<&str> = with("undecided").into_iter().chain(with("not defined")).collect();
    let clause = |names: Vec<&str>, text: &str| (!names.is_empty()).then(|| format!("{text} {}", names.join(", ")));
    let wins = better.len() == selection.others.len() && !better.is_empty();
    let clauses = [clause(better, "better than"), clause(worse, "worse than"), clause(open, "no clear difference to")];
    let said: Vec<String> = clauses.into_iter().flatten().collect();
    let verdict = if wins { "beats every other selection" } else { "does not beat every other selection" };
    Text::from(format!("At {} on average, ", plural(selection.bits as usize, "bit"))).then_code("a2").then(format!(
        " {verdict} on readout error: {}.",
        if said.is_empty() { "nothing to compare with".into() } else { said.join("; ") }
    ))
}

/// A rival at its number of bits.
struct Duel<'a>(&'a Selection, &'a SelectionRival);

fn selection(selections: &[Selection]) -> Table {
    let columns: &[Column<Duel>] = &[
        ("against", Align::Left, |d| Text::code(&d.1.policy).into()),
        ("code bits", Align::Right, |d| bits(d.1.code_bits)),
        ("its readout error", Align::Right, |d| number(Some(d.1.readout))),
        ("of a2", Align::Right, |d| number(Some(d.0.a2))),
        ("ln ratio", Align::Right, |d| interval(d.1.log_ratio, |v| format::signed(v, 3))),
        ("heads won", Align::Right, |d| maybe(d.1.heads_won, percent).into()),
        ("outcome", Align::Left, |d| outcome(d.1).into()),
    ];
    let duels: Vec<Vec<Duel>> = selections.iter().map(|s| s.others.iter().map(|r| Duel(s, r)).collect()).collect();
    let title = |s: &Selection| Some(format!("{} on average", plural(s.bits as usize, "bit")));
    let groups = selections.iter().zip(&duels).map(|(s, duels)| (title(s), duels.iter().collect())).collect();
    let caption = "Which values get more bits, at equal mean bits: readout error (E5), mean over heads. Ln ratio: mean over heads of \
                   ln(E5 of the other / E5 of a2), above 0 where a2 is better.";
    Table::grouped(caption, columns, groups)
}
