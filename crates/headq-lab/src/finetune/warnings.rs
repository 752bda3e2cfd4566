//! What a fine-tuning should say of itself: settings and heads of which little is to be expected.

use headq::scheme::{KeyScheme, Scope};
use headq::stats::{LayerStats, Moments};

use super::Request;
use super::train::LayerTrained;
use crate::overlap::{self, MadeFrom, Passages};
use crate::text::Windows;

/// A head whose residuals vary by less than this share of its keys' mean square has residuals that no softmax can see.
const STILL: f64 = 1e-12;

/// Windows of all texts together.
pub fn count(texts: &[Windows]) -> usize {
    texts.iter().map(|t| t.windows.len()).sum()
}

/// What can be said before training begins.
pub fn before(request: &Request, key: &KeyScheme, settled: &[Vec<usize>]) -> Vec<String> {
    let rank = key.side.map_or(0, |side| side.rank);
    let width = request.model.config().head_dim;
    let one_window = (count(request.train) == 1).then(|| {
        format!(
            "one window of {} tokens to train on: the basis is likely to fit the attention of that window and of no other text \
             (overfitting); train on more windows",
            request.context()
        )
    });
    let full_rank = (rank == width).then(|| {
        format!(
            "rank {rank} is the head width: the correction is not low-rank, it codes each key a second time; hold it against a base \
             quantizer of more bits, or give a lower rank"
        )
    });
    let heads = settled.iter().enumerate().filter(|(_, heads)| !heads.is_empty()).map(|(layer, heads)| {
        let list: Vec<String> = heads.iter().map(usize::to_string).collect();
        format!("layer {layer} {} {}", if heads.len() == 1 { "head" } else { "heads" }, list.join(", "))
    });
    let heads: Vec<String> = heads.collect();
    let nothing = (!heads.is_empty()).then(|| {
        format!(
            "nothing to correct in {}: all queries are zero there, or the base code changes all keys alike, which no softmax sees; these \
             heads keep their initial basis",
            heads.join("; ")
        )
    });
    [one_window, full_rank, nothing].into_iter().flatten().chain(not_held_out(request)).collect()
}

/// Held-out text that is trained on, or that the statistics are of.
fn not_held_out(request: &Request) -> Vec<String> {
    let texts: Vec<_> = request.train.iter().map(|t| t.text.clone()).collect();
    let passages = Passages::of_all(request.train, request.add_bos);
    let header = &request.stats.header;
    let made_from = [
        MadeFrom { artifact: "the training".into(), texts: &texts, passages: &passages },
        MadeFrom { artifact: "the initial basis".into(), texts: &header.texts, passages: &header.passages },
    ];
    // A text that cannot be read any more has nothing to be warned of here.
    let found = overlap::find(request.held_out, request.add_bos, &made_from).unwrap_or_default().found;
    found.iter().map(|o| format!("held out is not new: {o}")).collect()
}

/// What can be said at the end of training at a learning rate.
pub fn after(lr: f64, trained: &[LayerTrained]) -> Vec<String> {
    let gained = trained.iter().any(|t| t.best_loss.iter().zip(&t.initial_loss).any(|(best, initial)| best < initial));
    let idle = trained.iter().all(|t| t.steps == 0);
    let message = if idle {
        "nothing to learn: the initial basis leaves no loss, or there is nothing to correct; it is what is saved"
            .to_string()
    } else {
        format!(
            "no head got better on the held-out windows than its initial basis, which is what is saved; give a learning rate below {lr}, \
             or more windows to train on"
        )
    };
    let worse = trained
        .iter()
        .flat_map(|t| t.best_loss.iter().zip(&t.uncorrected_loss))
        .filter(|(best, none)| best > none)
        .count();
    let harmful = (worse > 0).then(|| {
        format!(
            "{worse} of {} held-out losses are worse with the trained basis than with no correction at all; do without it, or train longer",
            trained.iter().map(|t| t.best_loss.len()).sum::<usize>()
        )
    });
    (!gained).then_some(message).into_iter().chain(harmful).collect()
}

/// Heads of a layer that have nothing to correct: no query reads anything of them, or their residuals do not vary.
pub fn settled(layer: &LayerStats, scope: Scope) -> Vec<usize> {
    let group = layer.q.len() / layer.k.len();
    let heads = match scope {
        Scope::KvHead => layer.k.len(),
        Scope::QueryHead => layer.q.len(),
    };
    let still = |head: usize| {
        let (queries, kv_head) = match scope {
            Scope::KvHead => (layer.pooled_queries(head), head),
            Scope::QueryHead => (layer.q[head].clone(), head / group),
        };
        let size = |m: &Moments| m.second().trace();
        let varies = layer.e[kv_head].covariance().trace() > STILL * size(&layer.k[kv_head]);
        size(&queries) == 0.0 || !varies
    };
    (0..heads).filter(|&head| still(head)).collect()
}

#[cfg(test)]
mod tests {
    use super::super::train::Point;
    use super::*;

    /// A layer of two heads after so many steps, with its held-out losses: without a correction, at first, and of what is saved.
    fn layer(steps: usize, uncorrected: [f64; 2], initial: [f64; 2], best: [f64; 2]) -> LayerTrained {
        LayerTrained {
            best: Point { decoder: vec![1.0; 4], ..Point::default() },
            uncorrected_loss: uncorrected.to_vec(),
            initial_loss: initial.to_vec(),
            best_loss: best.to_vec(),
            measurements: Vec::new(),
            steps,
            seconds: 0.0,
        }
    }

    #[test]
    fn a_basis_that_does_harm_is_warned_of() {
        let good = layer(9, [0.5, 0.5], [0.3, 0.3], [0.2, 0.1]);
        let bad = layer(9, [0.5, 0.1], [0.4, 0.3], [0.3, 0.2]);
        assert_eq!(after(0.01, &[good]), Vec::<String>::new());
        let said = after(0.01, &[layer(9, [0.5, 0.5], [0.3, 0.3], [0.2, 0.1]), bad]);
        assert_eq!(said.len(), 1, "{said:?}");
        assert!(said[0].starts_with("1 of 4 held-out losses are worse with the trained basis than with no correction"));
        assert!(said[0].ends_with("do without it, or train longer"));
    }

    #[test]
    fn training_that_gains_nothing_is_warned_of() {
        let none = after(0.25, &[layer(9, [0.5, 0.5], [0.3, 0.3], [0.3, 0.3])]);
        assert!(
            matches!(&none[..], [one] if one.contains("no head got better") && one.contains("below 0.25")),
            "{none:?}"
        );
        let harmful = after(0.25, &[layer(9, [0.1, 0.5], [0.3, 0.3], [0.3, 0.3])]);
        assert!(matches!(&harmful[..], [_, two] if two.starts_with("1 of 2 held-out losses")), "{harmful:?}");
        let idle = after(0.25, &[layer(0, [0.0, 0.0], [0.0, 0.0], [0.0, 0.0])]);
        assert!(matches!(&idle[..], [one] if one.starts_with("nothing to learn")), "{idle:?}");
    }
}
