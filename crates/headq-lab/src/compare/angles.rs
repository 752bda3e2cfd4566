//! Principal angles between the subspaces that bases span.

use headq::Basis;
use headq::scheme::Scope;
use nalgebra::DMatrix;
use rayon::prelude::*;

use super::data::{Angles, PairAngles};
use crate::diagnose::statistics::quantile;

/// Part of a unit column that must lie outside the span of the others for it to count: bases are stored in f32, whose rounding
/// makes columns that depend on each other look independent.
const SPAN_TOLERANCE: f64 = 1e-6;

/// Principal angles between the column spans of `a` and `b`, in radians, ascending: as many as the smaller span has dimensions.
///
/// The columns need not be orthonormal or independent. Cosines are the singular values of AᵀB, sines those of (I − AAᵀ)B, with A and
/// B orthonormal bases of the spans (Björck and Golub 1973, *Numerical methods for computing angles between linear subspaces*). An
/// angle below 45° is taken from its sine and any other from its cosine, so that angles near 0 are as exact as those near 90°: the
/// cosine of 1e-8 is 1 in f64.
///
/// # Shapes
/// - `a`, `b`: `[width, columns]`, of the same width
///
/// # Panics
/// If the widths differ.
pub fn principal_angles(a: &DMatrix<f64>, b: &DMatrix<f64>) -> Vec<f64> {
    assert_eq!(a.nrows(), b.nrows(), "subspaces of one space");
    let (a, b) = (orthonormal(a), orthonormal(b));
    let (large, small) = if a.ncols() >= b.ncols() { (a, b) } else { (b, a) };
    if small.ncols() == 0 {
        return Vec::new();
    }
    let inside = large.tr_mul(&small);
    let outside = &small - &large * &inside;
    // The largest cosine belongs to the smallest sine.
    let cosines = ascending(&inside).into_iter().rev();
    let mut angles: Vec<f64> = cosines.zip(ascending(&outside)).map(|(cosine, sine)| angle(cosine, sine)).collect();
    angles.sort_by(f64::total_cmp);
    angles
}

/// The angle in [0, π/2] of a cosine and a sine, from the one that determines it better.
fn angle(cosine: f64, sine: f64) -> f64 {
    if sine < cosine { sine.min(1.0).asin() } else { cosine.min(1.0).acos() }
}

fn ascending(x: &DMatrix<f64>) -> Vec<f64> {
    let mut values: Vec<f64> = x.singular_values().iter().copied().collect();
    values.sort_by(f64::total_cmp);
    values
}

/// An orthonormal basis of the span of the columns: QR with column pivoting, after each column was made a unit vector.
fn orthonormal(x: &DMatrix<f64>) -> DMatrix<f64> {
    let mut unit = x.clone();
    for mut column in unit.column_iter_mut() {
        // A column of zeros stays one.
        let _ = column.try_normalize_mut(0.0);
    }
    let qr = unit.col_piv_qr();
    let independent = qr.r().diagonal().iter().filter(|r| r.abs() > SPAN_TOLERANCE).count();
    qr.q().columns(0, independent).into_owned()
}

/// Which of a basis's two matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    /// U
    Decoder,
    /// W
    Encoder,
}

/// U or W of one side head: `[head_dim, rank]`.
pub(super) fn decoder(basis: &Basis, layer: usize, head: usize) -> DMatrix<f64> {
    matrix(basis, Side::Decoder, layer, head)
}

/// W of one side head: `[head_dim, rank]`; U where they are the same.
pub(super) fn encoder(basis: &Basis, layer: usize, head: usize) -> DMatrix<f64> {
    matrix(basis, Side::Encoder, layer, head)
}

fn matrix(basis: &Basis, side: Side, layer: usize, head: usize) -> DMatrix<f64> {
    let all = match side {
        Side::Decoder => &basis.decoder,
        Side::Encoder => basis.encoder.as_ref().unwrap_or(&basis.decoder),
    };
    let size = basis.head_dim * basis.rank;
    let start = (layer * basis.side_heads + head) * size;
    let rows = all[start..start + size].iter().map(|&v| f64::from(v));
    DMatrix::from_row_iterator(basis.head_dim, basis.rank, rows)
}

/// Principal angles between two bases of one model in every layer and head.
///
/// Heads are KV heads where both bases have one matrix for each; otherwise query heads, each of which reads the matrix of its KV head
/// in a basis of that scope.
///
/// # Panics
/// If the bases are of models of different shapes.
pub fn pair_angles(first: (usize, &Basis), second: (usize, &Basis)) -> PairAngles {
    let ((i, a), (j, b)) = (first, second);
    assert!(a.layers == b.layers && a.head_dim == b.head_dim, "bases of one model");
    let heads = a.side_heads.max(b.side_heads);
    let of = |side: Side| {
        let angles = |k: usize| -> Vec<f64> {
            let (layer, head) = (k / heads, k % heads);
            let [a, b] = [a, b].map(|basis| matrix(basis, side, layer, head * basis.side_heads / heads));
            principal_angles(&a, &b).into_iter().map(f64::to_degrees).collect()
        };
        let flat: Vec<Vec<f64>> = (0..a.layers * heads).into_par_iter().map(angles).collect();
        summarised(flat.chunks(heads).map(<[_]>::to_vec).collect())
    };
    PairAngles {
        first: i,
        second: j,
        scope: if a.scope == b.scope { a.scope } else { Scope::QueryHead }.to_string(),
        decoder: of(Side::Decoder),
        encoder: (!a.is_tied() || !b.is_tied()).then(|| of(Side::Encoder)),
    }
}

fn summarised(heads: Vec<Vec<Vec<f64>>>) -> Angles {
    let all = || heads.iter().flatten();
    let most = all().map(Vec::len).max().unwrap_or(0);
    let median = |k: usize| quantile(&all().filter_map(|angles| angles.get(k).copied()).collect::<Vec<_>>(), 0.5);
    Angles {
        median: (0..most).filter_map(median).collect(),
        largest: all().flatten().copied().max_by(f64::total_cmp),
        heads,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use headq::scheme::Family;
    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    const RIGHT: f64 = std::f64::consts::FRAC_PI_2;

    /// Numbers in [−1, 1).
    fn noise(rows: usize, columns: usize, seed: u64) -> DMatrix<f64> {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        DMatrix::from_fn(rows, columns, |_, _| 2.0 * rng.random::<f64>() - 1.0)
    }

    /// Columns e_i·cos θ_i + e_{r+i}·sin θ_i, whose span has the angles θ to that of the first r axes.
    fn tilted(width: usize, angles: &[f64]) -> DMatrix<f64> {
        let r = angles.len();
        DMatrix::from_fn(width, r, |row, i| match row {
            _ if row == i => angles[i].cos(),
            _ if row == r + i => angles[i].sin(),
            _ => 0.0,
        })
    }

    #[track_caller]
    fn near(found: &[f64], expected: &[f64], bound: f64) {
        assert_eq!(found.len(), expected.len(), "{found:?} and {expected:?}");
        for (f, e) in found.iter().zip(expected) {
            assert!((f - e).abs() <= bound, "{found:?} and {expected:?}");
        }
    }

    #[test]
    fn a_rotation_in_planes_gives_its_angles() {
        let axes = DMatrix::identity(16, 4);
        let angles = [0.01, 0.3, RIGHT / 2.0, 1.5];
        // In any coordinates, and for any bases of the two spans.
        for seed in 0..20 {
            let turn = noise(16, 16, seed).qr().q();
            let (mix_a, mix_b) = (noise(4, 4, 100 + seed), noise(4, 4, 200 + seed));
            let (a, b) = (&turn * &axes * mix_a, &turn * tilted(16, &angles) * mix_b);
            near(&principal_angles(&a, &b), &angles, 1e-12);
            near(&principal_angles(&b, &a), &angles, 1e-12);
        }
    }

    #[test]
    fn tiny_angles_keep_their_digits() {
        let turn = noise(12, 12, 3).qr().q();
        let angles = [1e-12, 1e-8, 3e-7, RIGHT - 1e-8];
        let (a, b) = (&turn * DMatrix::identity(12, 4), &turn * tilted(12, &angles));
        let found = principal_angles(&a, &b);
        for (f, e) in found.iter().zip(&angles) {
            assert!((f - e).abs() < 1e-15 + 1e-7 * e.min(RIGHT - e), "{found:?}");
        }
        // What the cosine alone would make of them.
        assert_eq!(1e-8f64.cos().acos(), 0.0);
    }

    #[test]
    fn equal_spans_have_no_angle_and_orthogonal_ones_are_square() {
        let a = noise(10, 3, 1);
        near(&principal_angles(&a, &a), &[0.0; 3], 1e-15);
        near(&principal_angles(&a, &(&a * noise(3, 3, 2))), &[0.0; 3], 1e-13);
        let q = noise(10, 10, 4).qr().q();
        near(&principal_angles(&q.columns(0, 3).into_owned(), &q.columns(3, 5).into_owned()), &[RIGHT; 3], 1e-14);
        // A part of the other span, and the whole space.
        near(&principal_angles(&q.columns(1, 2).into_owned(), &q.columns(0, 4).into_owned()), &[0.0; 2], 1e-14);
        near(&principal_angles(&a, &q), &[0.0; 3], 1e-14);
    }

    #[test]
    fn the_smallest_angle_is_that_of_the_nearest_two_vectors() {
        for seed in 0..10 {
            let (a, b) = (noise(5, 2, seed), noise(5, 2, 50 + seed));
            let directions = |x: &DMatrix<f64>| -> Vec<DMatrix<f64>> {
                let q = x.clone().qr().q();
                (0..2000)
                    .map(|i| f64::from(i) * RIGHT / 1000.0)
                    .map(|t| &q * DMatrix::from_vec(2, 1, vec![t.cos(), t.sin()]))
                    .collect()
            };
            let (ours, theirs) = (directions(&a), directions(&b));
            let nearest =
                ours.iter().flat_map(|x| theirs.iter().map(move |y| x.dot(y).abs())).fold(-1.0, f64::max).acos();
            // The farthest a vector of one span is from the other span.
            let q = b.clone().qr().q();
            let inside = |x: &DMatrix<f64>| q.tr_mul(x).norm();
            let farthest = ours.iter().map(inside).fold(1.0, f64::min).acos();
            near(&principal_angles(&a, &b), &[nearest, farthest], 2e-3);
        }
    }

    #[test]
    fn dependent_columns_and_zeros_span_less() {
        let a = noise(8, 3, 7);
        let mut dependent = noise(8, 4, 8);
        dependent.set_column(2, &(dependent.column(0) * 1e-3 + dependent.column(1) * 1e3));
        dependent.set_column(3, &nalgebra::DVector::zeros(8));
        let independent = dependent.columns(0, 2).into_owned();
        near(&principal_angles(&a, &dependent), &principal_angles(&a, &independent), 1e-12);
        assert!(principal_angles(&a, &DMatrix::zeros(8, 2)).is_empty());
    }

    /// A basis whose matrices are those of `of`, by layer and side head.
    fn basis(scope: Scope, side_heads: usize, rank: usize, of: impl Fn(usize, usize) -> DMatrix<f64>) -> Basis {
        let rows = |m: DMatrix<f64>| m.transpose().iter().map(|&v| v as f32).collect::<Vec<_>>();
        let decoder =
            (0..2).flat_map(|l| (0..side_heads).map(move |h| (l, h))).flat_map(|(l, h)| rows(of(l, h))).collect();
        let fitted = Basis::fit(
            &[headq::LayerStats::new(4, 2, 6), headq::LayerStats::new(4, 2, 6)],
            Family::Random,
            rank,
            scope,
            0,
        );
        Basis { decoder, ..fitted.unwrap() }
    }

    #[test]
    fn heads_of_different_scopes_are_met_by_query_head() {
        let axes = |first: usize| DMatrix::from_fn(6, 2, |row, c| f64::from(u8::from(row == first + c)));
        let by_kv = basis(Scope::KvHead, 2, 2, |layer, head| axes(layer + head));
        let by_query = basis(Scope::QueryHead, 4, 2, |layer, head| axes(layer + head / 2));
        let pair = pair_angles((0, &by_kv), (1, &by_query));
        assert_eq!((pair.scope.as_str(), pair.decoder.heads.len(), pair.decoder.heads[0].len()), ("query-head", 2, 4));
        near(&pair.decoder.median, &[0.0, 0.0], 1e-12);
        assert!(pair.decoder.largest.unwrap() < 1e-12 && pair.encoder.is_none());
        let shifted = basis(Scope::KvHead, 2, 2, |layer, head| axes(layer + head + 1));
        let pair = pair_angles((0, &by_kv), (2, &shifted));
        assert_eq!(pair.scope, "kv-head");
        near(&pair.decoder.heads[1][0], &[0.0, 90.0], 1e-12);
    }
}
