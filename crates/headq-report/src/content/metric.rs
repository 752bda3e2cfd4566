//! Link 1: what ranks quantizers.

use headq_lab::diagnose::data::{Correlation, Diagnosis, Interval, KeyPoint, Metric, Setting, ValuePoint};

use super::columns::{bits, interval, number, scheme};
use super::selection;
use crate::document::{Align, Block, Cell, Column, Figure, Panel, Source, Table, Text};
use crate::format::{self, count, maybe, plural, rho};
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
    let mut blocks = vec![
        Block::Table(correlations(metric, &resampled)),
        Block::Figure(keys(metric, source)),
        Block::Table(value_correlations(metric, &resampled)),
        Block::Figure(values(metric, source)),
    ];
    blocks.extend(selection::blocks(&metric.selection));
    Some(blocks)
}

const CORRELATION: &[Column<Correlation>] = &[
    ("within", Align::Left, |c| Text::code(&c.group).into()),
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

/// A quantity: its name, and with its unit.
type Quantity = (&'static str, &'static str);

const KL: Quantity = ("KL", "KL, nats");
const FISHER: Quantity = ("Fisher error", "Fisher error, nats");
const STORAGE: Quantity = ("storage MSE", "storage MSE");
const READOUT: Quantity = ("readout error", "readout error");
const A2: Quantity = ("A²", "A²");

/// Two panels, of one target against each of two predictors.
struct Scatters<'a> {
    title: &'static str,
    settings: &'a [Setting],
    points: Vec<Measured>,
    pooled: Option<&'a Correlation>,
    operator: Quantity,
    storage: Quantity,
    target: Quantity,
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
        let panel = |quantity: Quantity, x: fn(&Measured) -> f64, rho: Option<f64>, diagonal: bool| {
            let title = format!("{} against {}", self.target.0, quantity.0);
            let points = drawn.iter().map(|p| Point { x: x(p), y: p.target, series: series(p.setting) });
            let plot = Scatter { points: points.collect(), x_title: quantity.1, y_title: self.target.1, diagonal };
            Panel {
                title: Some(format!("{title}: ρ = {}", maybe(rho, format::rho)).into()),
                label: format!("{title}, {}", plural(drawn.len(), "point")),
                plot: Box::new(plot),
            }
        };
        let estimate =
            |of: fn(&Correlation) -> Option<Interval>| self.pooled.and_then(of).map(|interval| interval.estimate);
        let panels = vec![
            // The operator's metric approximates the target, so that equality means something.
            panel(self.operator, |p| p.operator, estimate(|c| c.operator), true),
            panel(self.storage, |p| p.storage, estimate(|c| c.storage), false),
        ];
        let series = names.iter().enumerate().map(|(i, name)| (Key::Marker(i), Text::code(*name)));
        Figure {
            title: self.title.into(),
            notes: notes(&self.points),
            panels,
            legend: series.chain([(Key::Reference, "equality".into())]).collect(),
            source: source.clone(),
            data: vec![self.data],
        }
    }
}

fn notes(points: &[Measured]) -> Vec<String> {
    let mut notes = vec!["Each point is one KV head of one layer under one setting.".to_string()];
    let values: [fn(&Measured) -> f64; 3] = [|p| p.storage, |p| p.operator, |p| p.target];
    if values.iter().all(|value| points.iter().any(|p| value(p) > 0.0)) {
        notes.push("All axes are logarithmic.".into());
    }
    if points.len() > MOST {
        notes.push(format!("Drawn are {} of {}, chosen evenly.", count(MOST as u64), plural(points.len(), "point")));
    }
    if points.iter().any(|p| values.iter().any(|value| value(p) <= 0.0)) {
        notes.push("Zeros are drawn at the lower end.".into());
    }
    notes
}

fn keys(metric: &Metric, source: &Source) -> Figure {
    let values: &[Value<KeyPoint>] = &[
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
        operator: FISHER,
        storage: STORAGE,
        target: KL,
        data: medians(&metric.settings, &metric.points, |p| p.setting, values),
    }
    .figure(source)
}

fn values(metric: &Metric, source: &Source) -> Figure {
    let values: &[Value<ValuePoint>] =
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
        operator: A2,
        storage: STORAGE,
        target: READOUT,
        data: medians(&metric.value_settings, &metric.value_points, |p| p.setting, values),
    }
    .figure(source)
}

/// A column of medians: title, and what it takes of a point.
type Value<P> = (&'static str, fn(&P) -> f64);

/// The settings, each with the medians over its points.
fn medians<P>(settings: &[Setting], points: &[P], setting: fn(&P) -> usize, values: &[Value<P>]) -> Table {
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
