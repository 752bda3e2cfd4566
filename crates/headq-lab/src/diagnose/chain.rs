//! The passes over text that the links are made of.

use headq::basis::{captured_share, descending_eigen, fit_head};
use headq::budget::HeadShape;
use headq::scheme::{Family, Scheme};
use headq::stats::LayerStats;
use headq::{
    Attention, AttentionSite, Diagnostics, HeadDiagnostics, HeadqAttention, KeyStatistics, LayerProbe, ShiftChange,
};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::data::{
    Diagnosis, HeadMap, KeyPoint, LINKS, NullCurve, NullPoint, RankCurve, Role, Setting, Spectrum, ValuePoint,
};
use super::flips::{Flips, WindowFlips};
use super::judge::{self, BasisDetail, Measured, MeasuredFamily, MeasuredRow, Reference};
use super::settings::Plan;
use super::statistics::{Bootstrap, quantile};
use super::thresholds::Thresholds;
use crate::artifact::StatsArtifact;
use crate::evaluate::{DensePart, PartStore, PlannedScheme, Request, Sources, head_shape, part};
use crate::run::slug;
use crate::workers::map_in_order;
use crate::{LabError, Observer};
use burn::tensor::Tensor;

/// α of the null-space intervention.
const ALPHAS: [f32; 9] = [0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0];
/// Change of a dense probability that f32 attention may show when all keys are shifted, for scores of moderate size.
const DENSE_TOLERANCE: f64 = 1e-5;
/// Rounding of a score, relative to the largest: products and sums of d channels, twice.
const SCORE_ROUNDING: f64 = 4.0 * f32::EPSILON as f64;

/// A diagnosis under way.
pub(super) struct Chain<'a> {
    /// Model, texts, seed.
    pub request: &'a Request<'a>,
    /// What is compared.
    pub plan: &'a Plan,
    /// Calibration statistics.
    pub sources: &'a Sources,
    /// Statistics of the measured text, made when they are first needed.
    pub held_out: &'a dyn Fn(&dyn Observer) -> Result<StatsArtifact, LabError>,
    /// What decides verdicts.
    pub thresholds: &'a Thresholds,
    /// Progress and interruption.
    pub observer: &'a dyn Observer,
    /// Finished parts.
    pub store: &'a dyn PartStore,
}

/// Puts the name of a link before that of each pass.
struct Named<'a> {
    link: &'a str,
    observer: &'a dyn Observer,
}

impl Observer for Named<'_> {
    fn begin(&self, what: &str, total: usize) {
        self.observer.begin(&format!("{}: {what}", self.link), total);
    }
    fn step(&self) {
        self.observer.step();
    }
    fn end(&self) {
        self.observer.end();
    }
    fn cancelled(&self) -> bool {
        self.observer.cancelled()
    }
}

/// Errors of every setting, one entry each.
type Errors = Vec<HeadDiagnostics>;

/// Errors and losses of an evaluated scheme.
struct Evaluated {
    measured: Measured,
    errors: HeadDiagnostics,
}

/// The null-space pass.
#[derive(Serialize, Deserialize)]
struct NullPart {
    probability: f64,
    score: f64,
    errors: Errors,
}

impl Chain<'_> {
    /// Takes the links asked for and adds them to `diagnosis`.
    pub fn take(&self, links: [bool; 7], mut diagnosis: Diagnosis) -> Result<Diagnosis, LabError> {
        let d = &mut diagnosis;
        for (i, _) in links.iter().enumerate().filter(|(_, asked)| **asked) {
            let named = Named { link: &format!("{}/{} {}", i + 1, LINKS.len(), LINKS[i].0), observer: self.observer };
            match i {
                0 => d.metric = Some(self.metric(&named)?),
                1 => d.counterexamples = Some(self.counterexamples(&named)?),
                2 => d.null_space = Some(self.null_space(&named)?),
                3 => d.bases = Some(self.bases(&named)?),
                4 => d.direction = Some(self.direction(&named)?),
                5 => d.route_flips = Some(self.route_flips(&named)?),
                _ => d.perplexity = Some(self.perplexity(&named)?),
            }
        }
        Ok(diagnosis)
    }

    fn shape(&self) -> HeadShape {
        head_shape(self.request.model.config())
    }

    fn vocabulary(&self) -> usize {
        self.request.model.config().vocab_size
    }

    fn planned(&self, scheme: &Scheme) -> Result<PlannedScheme, LabError> {
        self.sources.plan(&scheme.to_string(), self.request.model.config(), self.request.seed)
    }

    // Links 1 and 2: one dense pass under all settings.

    fn settings(&self) -> (Vec<Scheme>, Vec<Scheme>) {
        (self.plan.key_settings(), self.plan.value_settings())
    }

    fn setting_errors(&self, observer: &dyn Observer) -> Result<Errors, LabError> {
        let (keys, values) = self.settings();
        let planned = keys.iter().chain(&values).map(|s| self.planned(s)).collect::<Result<Vec<_>, _>>()?;
        let fits = |errors: &Errors| errors.len() == planned.len();
        part(self.store, "settings", fits, || {
            Ok(self.request.dense_pass(&format!("{} settings", planned.len()), &planned, observer)?.diagnostics)
        })
    }

    fn named(&self, schemes: &[Scheme]) -> Result<Vec<Setting>, LabError> {
        schemes.iter().map(|s| Ok(self.setting(&self.planned(s)?))).collect()
    }

    fn setting(&self, planned: &PlannedScheme) -> Setting {
        let scheme = &planned.scheme;
        let budget = planned.budget(&self.shape(), self.request.texts[0].windows[0].len());
        let (quantizer, bits, code_bits) = match (&scheme.key, &scheme.value) {
            (Some(key), _) => (key.base.quantizer.name(), key.base.bits.ceil(), budget.key_bits),
            (None, Some(value)) => (value.policy.name(), value.bits.ceil(), budget.value_bits),
            (None, None) => ("dense", 16, budget.key_bits),
        };
        Setting { scheme: scheme.to_string(), quantizer: quantizer.into(), bits, code_bits }
    }

    /// Every head under every setting in `of`, where `point` is defined.
    fn points<T>(
        &self,
        errors: &[HeadDiagnostics],
        point: impl Fn(usize, usize, usize, &Diagnostics) -> Option<T>,
    ) -> Vec<T> {
        let shape = self.shape();
        let heads = || (0..shape.layers).flat_map(|layer| (0..shape.kv_heads).map(move |head| (layer, head)));
        let of_setting = |(setting, errors): (usize, &HeadDiagnostics)| {
            heads().filter_map(|(l, h)| point(l, h, setting, errors.head(l, h))).collect::<Vec<_>>()
        };
        errors.iter().enumerate().flat_map(of_setting).collect()
    }

    fn key_points(&self, errors: &[HeadDiagnostics]) -> Vec<KeyPoint> {
        self.points(errors, |layer, head, setting, d| {
            let (mse, fisher, kl) = (d.key_mse()?, d.fisher()?, d.kl()?);
            Some(KeyPoint { layer, head, setting, mse, fisher, kl, output_error: d.output_error()? })
        })
    }

    fn metric(&self, observer: &dyn Observer) -> Result<super::data::Metric, LabError> {
        let (keys, values) = self.settings();
        let errors = self.setting_errors(observer)?;
        let (of_keys, of_values) = errors.split_at(keys.len());
        let value_points = self.points(of_values, |layer, head, setting, d| {
            Some(ValuePoint {
                layer,
                head,
                setting,
                mse: d.value_mse()?,
                a2: d.readout_diagonal()?,
                readout: d.readout_error()?,
            })
        });
        let points = self.key_points(of_keys);
        let (keys, values) = (self.named(&keys)?, self.named(&values)?);
        Ok(judge::metric(keys, points, values, value_points, self.thresholds, self.request.seed))
    }

    fn counterexamples(&self, observer: &dyn Observer) -> Result<super::data::Counterexamples, LabError> {
        let (keys, _) = self.settings();
        let errors = self.setting_errors(observer)?;
        let settings = self.named(&keys)?;
        let points = self.key_points(&errors[..keys.len()]);
        Ok(judge::counterexamples(&settings, &points, self.thresholds, self.request.seed))
    }

    // Link 3.

    fn null_space(&self, observer: &dyn Observer) -> Result<super::data::NullSpace, LabError> {
        let curves = self.plan.null_space();
        let fits = |part: &NullPart| part.errors.len() == curves.len() * ALPHAS.len();
        let found: NullPart =
            part(self.store, "null-space", fits, || self.null_space_pass(&curves.map(|(s, _)| s), observer))?;
        let curve = |((scheme, equivariant), errors): (&(Scheme, bool), &[HeadDiagnostics])| NullCurve {
            scheme: scheme.to_string(),
            equivariant: *equivariant,
            points: ALPHAS.iter().zip(errors).filter_map(|(alpha, e)| null_point(*alpha, &e.total())).collect(),
        };
        let curves = curves.iter().zip(found.errors.chunks(ALPHAS.len())).map(curve).collect();
        let tolerance = DENSE_TOLERANCE.max(SCORE_ROUNDING * found.score);
        Ok(judge::null_space(found.probability, tolerance, curves, self.thresholds))
    }

    /// Codes k − (1 − α)μ = (k − μ) + αμ under each scheme, whose scales stay those of centered keys.
    fn null_space_pass(&self, schemes: &[Scheme], observer: &dyn Observer) -> Result<NullPart, LabError> {
        let device = self.request.model.device();
        let layers = self.shape().layers;
        let keys = self.planned(&schemes[0])?.keys.ok_or_else(|| {
            LabError::Usage(format!("scheme '{}': the null-space intervention needs calibrated means", schemes[0]))
        })?;
        let shifted: Vec<KeyStatistics> = ALPHAS.iter().map(|alpha| keys.with_mean_times(1.0 - alpha)).collect();
        let modules = |scheme: &Scheme, keys: &KeyStatistics| -> Vec<HeadqAttention> {
            (0..layers).map(|l| HeadqAttention::calibrated(*scheme, None, Some(keys), l, &device)).collect()
        };
        let make = || {
            let all = schemes.iter().flat_map(|s| shifted.iter().map(|keys| modules(s, keys))).collect::<Vec<_>>();
            let offset = |keys: &KeyStatistics, layer| Tensor::from_data(keys.mean_of(layer), &device);
            let offsets: Vec<Vec<Tensor<4>>> =
                (0..layers).map(|layer| shifted.iter().map(|keys| offset(keys, layer)).collect()).collect();
            (self.request.model.clone(), all, offsets)
        };
        let windows = self.request.windows();
        let mut whole = NullPart {
            probability: 0.0,
            score: 0.0,
            errors: vec![HeadDiagnostics::default(); schemes.len() * ALPHAS.len()],
        };
        map_in_order(
            "shifted keys",
            windows.len(),
            self.request.cores(),
            observer,
            make,
            |(model, modules, offsets), i| {
                let probe = LayerProbe::new(modules.iter().map(Vec::as_slice).collect());
                let mut shifting = Shifting { probe, offsets, worst: ShiftChange::default() };
                let _ = model.hidden(model.ids(windows[i], 1, 0)?, 0, &mut shifting);
                Ok((shifting.worst, shifting.probe.finish()))
            },
            |_, (worst, errors)| {
                whole.probability = whole.probability.max(worst.probability);
                whole.score = whole.score.max(worst.score);
                whole.errors.iter_mut().zip(&errors).for_each(|(mine, theirs)| mine.merge(theirs));
            },
        )?;
        Ok(whole)
    }

    // Links 4, 5 and 7: evaluated schemes.

    /// Errors and losses of schemes; `dense` need not be among them. What one link has evaluated, the next takes up.
    fn evaluate(&self, schemes: &[Scheme], observer: &dyn Observer) -> Result<Vec<Evaluated>, LabError> {
        let planned = schemes.iter().map(|s| self.planned(s)).collect::<Result<Vec<_>, _>>()?;
        self.measure_errors(&planned, observer)?;
        let dense = self.dense_losses(observer)?;
        planned.iter().map(|p| self.evaluated(p, &dense, observer)).collect()
    }

    /// Takes the errors of the schemes that have none yet, in one dense pass.
    fn measure_errors(&self, planned: &[PlannedScheme], observer: &dyn Observer) -> Result<(), LabError> {
        let mut missing = Vec::new();
        for p in planned {
            if self.kept_errors(p)?.is_none() {
                missing.push(p.clone());
            }
        }
        if missing.is_empty() {
            return Ok(());
        }
        let DensePart { nll, diagnostics } = self.request.dense_pass(
            &format!("errors of {} scheme{}", missing.len(), if missing.len() == 1 { "" } else { "s" }),
            &missing,
            observer,
        )?;
        part(self.store, "nll-dense", |kept: &Vec<f64>| kept.len() == nll.len(), || Ok(nll.clone()))?;
        for (p, errors) in missing.iter().zip(diagnostics) {
            part(self.store, &part_name("errors", &p.scheme), |_| false, || Ok(errors))?;
        }
        Ok(())
    }

    fn kept_errors(&self, planned: &PlannedScheme) -> Result<Option<HeadDiagnostics>, LabError> {
        let shape = self.shape();
        let kept = self.store.get(&part_name("errors", &planned.scheme))?;
        let kept: Option<HeadDiagnostics> = kept.and_then(|value| serde_json::from_value(value).ok());
        Ok(kept.filter(|e| e.heads.len() == shape.layers * shape.kv_heads))
    }

    fn dense_losses(&self, observer: &dyn Observer) -> Result<Vec<f64>, LabError> {
        let fits = |nll: &Vec<f64>| nll.len() == self.scored();
        part(self.store, "nll-dense", fits, || Ok(self.request.dense_pass("dense", &[], observer)?.nll))
    }

    fn scored(&self) -> usize {
        self.request.windows().iter().map(|w| w.len() - 1).sum()
    }

    fn evaluated(
        &self,
        planned: &PlannedScheme,
        dense: &[f64],
        observer: &dyn Observer,
    ) -> Result<Evaluated, LabError> {
        let fits = |nll: &Vec<f64>| nll.len() == dense.len();
        let nll = match planned.scheme.is_dense() {
            true => dense.to_vec(),
            false => {
                let make = || self.request.scheme_pass(planned, observer);
                part(self.store, &part_name("nll", &planned.scheme), fits, make)?
            }
        };
        let errors = self.kept_errors(planned)?.ok_or_else(|| {
            LabError::Usage(format!("the errors of {} are gone from the run's folder; start again", planned.scheme))
        })?;
        let result = self.request.result(planned, &nll, dense, Some(&errors.total()), None);
        Ok(Evaluated { measured: Measured { window_nll: self.request.by_window(&nll), result }, errors })
    }

    fn reference(&self, evaluated: &mut Vec<Evaluated>) -> Reference {
        let (dense, base) = (evaluated.remove(0), evaluated.remove(0));
        Reference { dense: dense.measured, base: base.measured, vocabulary: self.vocabulary() }
    }

    fn bases(&self, observer: &dyn Observer) -> Result<super::data::Bases, LabError> {
        let families: Vec<Family> = Plan::families().collect();
        let mut schemes = vec![Scheme::DENSE, self.plan.uncorrected()];
        schemes.extend(families.iter().map(|f| self.plan.corrected(*f)));
        let mut evaluated = self.evaluate(&schemes, observer)?;
        let maps = evaluated[1..].iter().map(|e| self.head_map(e)).collect();
        let reference = self.reference(&mut evaluated);
        let held_out = (self.held_out)(observer)?;
        let ranks = ranks(self.plan.head_dim);
        let curve = |family: Family| -> Result<RankCurve, LabError> {
            let shares = ranks.iter().map(|r| Ok(mean(&self.captured(family, *r, &held_out.layers)?)));
            Ok(RankCurve { family: family.to_string(), shares: shares.collect::<Result<_, LabError>>()? })
        };
        let curves = families.iter().map(|f| curve(*f)).collect::<Result<Vec<_>, _>>()?;
        let measured = families.iter().zip(evaluated).map(|(family, run)| {
            let captured = self.captured(*family, self.plan.rank, &held_out.layers)?;
            Ok(MeasuredFamily { family: *family, run: run.measured, captured })
        });
        let measured = measured.collect::<Result<Vec<_>, LabError>>()?;
        let detail = BasisDetail { curves, spectrum: spectrum(self.calibration()), maps, ranks };
        Ok(judge::bases(reference, measured, detail, self.thresholds, self.request.seed))
    }

    fn calibration(&self) -> &[LayerStats] {
        &self.sources.stats[0].1.layers
    }

    /// Share of the held-out score error that bases of a family and rank capture, by layer and KV head.
    fn captured(&self, family: Family, rank: usize, held_out: &[LayerStats]) -> Result<Vec<Option<f64>>, LabError> {
        let shape = self.shape();
        let calibration = self.calibration();
        let share = |i: usize| {
            let (layer, head) = (i / shape.kv_heads, i % shape.kv_heads);
            let (fitted, seen) = (&calibration[layer], &held_out[layer]);
            let basis = fit_head(
                family,
                rank,
                &fitted.pooled_queries(head),
                &fitted.e[head],
                headq::basis::head_seed(self.request.seed, layer, head),
            );
            let reason = |reason| headq::Error::Basis { family: family.to_string(), reason };
            Ok(captured_share(&seen.pooled_queries(head), &seen.e[head], &basis.map_err(reason)?))
        };
        (0..shape.layers * shape.kv_heads).into_par_iter().map(share).collect()
    }

    fn head_map(&self, evaluated: &Evaluated) -> HeadMap {
        let shape = self.shape();
        let fisher = |layer, head| evaluated.errors.head(layer, head).fisher();
        HeadMap {
            scheme: evaluated.measured.result.canonical.clone(),
            fisher: (0..shape.layers).map(|l| (0..shape.kv_heads).map(|h| fisher(l, h)).collect()).collect(),
        }
    }

    fn direction(&self, observer: &dyn Observer) -> Result<super::data::Direction, LabError> {
        let schemes =
            [Scheme::DENSE, self.plan.uncorrected(), self.plan.corrected(Family::QueryPca), self.plan.flipped()];
        let mut evaluated = self.evaluate(&schemes, observer)?;
        let reference = self.reference(&mut evaluated);
        let (corrected, flipped) = (evaluated.remove(0).measured, evaluated.remove(0).measured);
        Ok(judge::direction(reference, corrected, flipped, self.thresholds, self.request.seed))
    }

    fn perplexity(&self, observer: &dyn Observer) -> Result<super::data::Perplexity, LabError> {
        let mut rows = vec![(Role::Dense, Scheme::DENSE, None)];
        rows.extend(self.plan.perplexity_rows());
        let schemes: Vec<Scheme> = rows.iter().map(|(_, scheme, _)| *scheme).collect();
        let evaluated = self.evaluate(&schemes, observer)?;
        let measured = rows.into_iter().zip(evaluated).map(|((role, _, reference), evaluated)| MeasuredRow {
            role,
            run: evaluated.measured,
            reference: reference.map(|s| s.to_string()),
        });
        Ok(judge::perplexity(measured.collect(), self.vocabulary(), self.thresholds, self.request.seed))
    }

    // Link 6.

    fn route_flips(&self, observer: &dyn Observer) -> Result<super::data::RouteFlips, LabError> {
        let schemes = [self.plan.uncorrected(), self.plan.corrected(Family::QueryPca)];
        let fits = |flips: &Vec<Flips>| flips.len() == schemes.len();
        let flips = part(self.store, "route-flips", fits, || self.flip_pass(&schemes, observer))?;
        let bootstrap = Bootstrap::new(self.thresholds, self.request.seed);
        let results = schemes.iter().zip(&flips).map(|(s, f)| f.result(s.to_string(), &bootstrap)).collect();
        Ok(judge::route_flips(results, self.thresholds))
    }

    fn flip_pass(&self, schemes: &[Scheme], observer: &dyn Observer) -> Result<Vec<Flips>, LabError> {
        let planned = schemes.iter().map(|s| self.planned(s)).collect::<Result<Vec<_>, _>>()?;
        let (layers, device) = (self.shape().layers, self.request.model.device());
        let windows = self.request.windows();
        let mut whole = vec![Flips::default(); schemes.len()];
        map_in_order(
            "queries",
            windows.len(),
            self.request.cores(),
            observer,
            || (self.request.model.clone(), planned.iter().map(|p| p.modules(layers, &device)).collect::<Vec<_>>()),
            |(model, modules), i| {
                let mut flips = WindowFlips::new(self.request.seed, i, planned.len());
                let mut probe = LayerProbe::new(modules.iter().map(Vec::as_slice).collect()).with_queries(&mut flips);
                let _ = model.hidden(model.ids(windows[i], 1, 0)?, 0, &mut probe);
                drop(probe);
                Ok(flips.by_scheme)
            },
            |_, flips| whole.iter_mut().zip(flips).for_each(|(mine, theirs)| mine.merge(theirs)),
        )?;
        Ok(whole)
    }
}

/// Dense attention that also looks at what shifts of all keys do to it.
struct Shifting<'a> {
    probe: LayerProbe<'a>,
    /// By layer, then by α: `[1, kv_heads, 1, head_dim]`.
    offsets: &'a [Vec<Tensor<4>>],
    worst: ShiftChange,
}

impl Attention for Shifting<'_> {
    fn attend(&mut self, site: &AttentionSite, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>) -> Tensor<4> {
        let changes = self.offsets[site.layer].iter().map(|offset| ShiftChange::of(site, &q, &k, offset));
        self.worst = changes.fold(self.worst, ShiftChange::worst);
        self.probe.attend(site, q, k, v)
    }
}

fn null_point(alpha: f32, total: &Diagnostics) -> Option<NullPoint> {
    Some(NullPoint { alpha: alpha.into(), fisher: total.fisher()?, kl: total.kl()?, mse: total.key_mse()? })
}

/// Powers of two up to the head width, and the width.
fn ranks(head_dim: usize) -> Vec<usize> {
    let powers = std::iter::successors(Some(1), |r| Some(2 * r)).take_while(|r| *r < head_dim);
    powers.chain([head_dim]).collect()
}

fn mean(values: &[Option<f64>]) -> Option<f64> {
    let defined: Vec<f64> = values.iter().flatten().copied().collect();
    (!defined.is_empty()).then(|| defined.iter().sum::<f64>() / defined.len() as f64)
}

/// Quartiles over heads of the spectrum of E[q qᵀ], each divided by its trace.
fn spectrum(stats: &[LayerStats]) -> Spectrum {
    let heads: Vec<(&LayerStats, usize)> = stats.iter().flat_map(|l| (0..l.k.len()).map(move |h| (l, h))).collect();
    let of_head = |(layer, head): &(&LayerStats, usize)| -> Option<Vec<f64>> {
        let values = descending_eigen(layer.pooled_queries(*head).second()).0;
        let trace = values.sum();
        (trace > 0.0).then(|| values.iter().map(|v| v.max(0.0) / trace).collect())
    };
    let spectra: Vec<Vec<f64>> = heads.par_iter().filter_map(of_head).collect();
    let width = spectra.first().map_or(0, Vec::len);
    let at = |p: f64| {
        let column = |i: usize| spectra.iter().map(|s| s[i]).collect::<Vec<_>>();
        (0..width).filter_map(|i| quantile(&column(i), p)).collect()
    };
    Spectrum { low: at(0.25), median: at(0.5), high: at(0.75) }
}

/// Name of a scheme's part: readable, short and its own.
fn part_name(kind: &str, scheme: &Scheme) -> String {
    let text = scheme.to_string();
    let readable: String = slug(&text).chars().take(80).collect();
    let hash: String = crate::text::hex(&Sha256::digest(text.as_bytes())).chars().take(8).collect();
    format!("{kind}-{readable}-{hash}")
}
