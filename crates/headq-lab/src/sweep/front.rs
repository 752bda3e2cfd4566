//! Which schemes are on the front, and which are best within a budget.

use super::data::{Best, BitsOf, Coded, Row};

/// Perplexities that differ by less than this share count as alike.
const ALIKE: f64 = 0.003;

/// Whether each point of (bits, cost) is one that no other dominates: with no more of both, and less of one. A point that is not finite
/// is not on the front.
pub fn front(points: &[(f64, f64)]) -> Vec<bool> {
    let mut order: Vec<usize> =
        (0..points.len()).filter(|i| points[*i].0.is_finite() && points[*i].1.is_finite()).collect();
    order.sort_by(|a, b| points[*a].0.total_cmp(&points[*b].0).then(points[*a].1.total_cmp(&points[*b].1)));
    let mut on = vec![false; points.len()];
    let mut least = f64::INFINITY;
    for same_bits in order.chunk_by(|a, b| points[*a].0 == points[*b].0) {
        let own = points[same_bits[0]].1;
        if own < least {
            same_bits.iter().filter(|i| points[**i].1 == own).for_each(|i| on[*i] = true);
            least = own;
        }
    }
    on
}

/// Marks the rows that are on the fronts of what they code.
pub fn mark(rows: &mut [Row]) {
    for kv in [Coded::K, Coded::Kv] {
        let own: Vec<usize> = (0..rows.len()).filter(|i| rows[*i].kv == kv).collect();
        let points = |cost: fn(&Row) -> f64| {
            front(&own.iter().map(|i| (rows[*i].cache_bits, cost(&rows[*i]))).collect::<Vec<_>>())
        };
        let (ppl, kl) = (points(|r| r.nll), points(|r| r.kl));
        for (at, i) in own.into_iter().enumerate() {
            (rows[i].front_ppl, rows[i].front_kl) = (ppl[at], kl[at]);
        }
    }
}

/// Mean of the differences of two lists of window means, and its standard error; none where there is but one window.
pub fn paired(own: &[f64], other: &[f64]) -> (f64, Option<f64>) {
    let n = own.len().min(other.len()) as f64;
    let differences: Vec<f64> = own.iter().zip(other).map(|(a, b)| a - b).collect();
    let mean = differences.iter().sum::<f64>() / n;
    let variance = differences.iter().map(|d| (d - mean).powi(2)).sum::<f64>() / (n - 1.0);
    (mean, (n > 1.0).then(|| (variance / n).sqrt()))
}

/// The best row of each family within each budget, by budget and what is coded, best first.
pub fn best(rows: &[Row], budgets: &[f64], bits: BitsOf) -> Vec<Best> {
    let mut all = Vec::new();
    for (&budget, kv) in budgets.iter().flat_map(|b| [(b, Coded::K), (b, Coded::Kv)]) {
        // A hair of tolerance: sums of halves and thirds of bits are not exact.
        let within = |r: &&Row| r.kv == kv && bits.of(r) <= budget + 1e-9;
        let mut found: Vec<&Row> = Vec::new();
        for row in rows.iter().filter(within) {
            match found.iter_mut().find(|r| r.family == row.family) {
                None => found.push(row),
                Some(best) if row.nll < best.nll => *best = row,
                Some(_) => {}
            }
        }
        found.sort_by(|a, b| a.nll.total_cmp(&b.nll));
        let Some(first) = found.first().copied() else { continue };
        all.extend(found.into_iter().map(|row| {
            let (behind, behind_se) = paired(&row.window_nll, &first.window_nll);
            Best {
                budget,
                kv,
                family: row.family.clone(),
                scheme: row.scheme.clone(),
                bits: bits.of(row),
                cache_bits: row.cache_bits,
                ppl: row.ppl,
                excess: row.excess,
                kl: row.kl,
                behind,
                behind_se,
                close: row.ppl <= (1.0 + ALIKE) * first.ppl || behind_se.is_some_and(|se| behind <= se),
            }
        }));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use headq::basis::split_mix;

    #[test]
    fn the_front_is_what_nothing_dominates() {
        for trial in 0..300u64 {
            // Few distinct values, so that there are ties of all kinds.
            let draw = |i: u64| (split_mix(trial * 1000 + i) % 9) as f64;
            let mut points: Vec<(f64, f64)> = (0..trial % 40).map(|i| (draw(2 * i), draw(2 * i + 1))).collect();
            if trial % 5 == 0 {
                points.push((0.0, f64::NAN));
            }
            let dominates = |a: &(f64, f64), b: &(f64, f64)| a.0 <= b.0 && a.1 <= b.1 && (a.0 < b.0 || a.1 < b.1);
            let expected: Vec<bool> =
                points.iter().map(|p| p.1.is_finite() && !points.iter().any(|other| dominates(other, p))).collect();
            assert_eq!(front(&points), expected, "{points:?}");
        }
    }

    fn row(kv: Coded, family: &str, bits: f64, windows: &[f64]) -> Row {
        let nll = windows.iter().sum::<f64>() / windows.len() as f64;
        Row {
            scheme: format!("{family} {bits}"),
            canonical: String::new(),
            kv,
            family: family.into(),
            key_bits: bits,
            value_bits: 16.0,
            cache_bits: bits,
            bytes_per_token: 0.0,
            ppl: nll.exp(),
            nll,
            window_nll: windows.to_vec(),
            excess: 0.0,
            excess_se: None,
            kl: nll,
            window_kl: Vec::new(),
            front_ppl: false,
            front_kl: false,
        }
    }

    #[test]
    fn fronts_are_those_of_what_is_coded() {
        let mut rows =
            [row(Coded::K, "a", 3.0, &[2.0]), row(Coded::Kv, "a", 2.0, &[1.0]), row(Coded::K, "b", 4.0, &[2.5])];
        mark(&mut rows);
        assert_eq!(rows.each_ref().map(|r| r.front_ppl), [true, true, false]);
        assert_eq!(rows.each_ref().map(|r| r.front_kl), [true, true, false]);
    }

    #[test]
    fn the_best_of_each_family_is_within_the_budget() {
        let rows = [
            row(Coded::K, "a", 2.0, &[3.0, 3.4]),
            row(Coded::K, "a", 2.25, &[2.0, 2.4]),
            row(Coded::K, "a", 3.0, &[1.0, 1.0]),
            // Behind by 0.1 ± 0.2 in the mean.
            row(Coded::K, "b", 2.1, &[2.3, 2.3]),
            // Behind by 0.5 ± 0.
            row(Coded::K, "c", 2.2, &[2.5, 2.9]),
            row(Coded::Kv, "d", 1.0, &[0.0, 0.0]),
        ];
        let found = best(&rows, &[1.5, 2.25], BitsOf::Cache);
        let shown: Vec<(f64, &str, bool)> = found.iter().map(|b| (b.budget, b.scheme.as_str(), b.close)).collect();
        assert_eq!(
            shown,
            [
                (1.5, "d 1", true),
                (2.25, "a 2.25", true),
                (2.25, "b 2.1", true),
                (2.25, "c 2.2", false),
                (2.25, "d 1", true)
            ]
        );
        let (behind, se) = paired(&[2.2, 2.4], &[2.0, 2.4]);
        assert!((behind - 0.1).abs() < 1e-12 && (se.unwrap() - 0.1).abs() < 1e-12);
        assert_eq!(paired(&[1.0], &[1.0]), (0.0, None));
    }
}
