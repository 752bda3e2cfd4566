//! Which quantizers, policies and schemes each link compares, for any head width.

use headq::scheme::{
    BaseScheme, Bits, Family, Flush, MOST_KLT_BITS, Meta, Metric, Policy, Pool, Quantizer, RangeSource, Rounding,
    Scheme,
};

use super::data::Role;

/// The quantizers, policies and correction of a diagnosis.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// Base quantizer of links 4 to 7.
    pub base: BaseScheme,
    /// Rank of the correction.
    pub rank: usize,
    /// Bits of its side codes.
    pub bits: u32,
    /// Head width of the model.
    pub head_dim: usize,
}

/// A scheme that this module has written.
fn scheme(text: String) -> Scheme {
    text.parse().unwrap_or_else(|e| panic!("the program writes valid schemes: {e}"))
}

impl Plan {
    /// Channels that share a scale: 32, or the largest number below that divides the head width.
    fn channels(&self) -> usize {
        (1..=32).rev().find(|c| self.head_dim.is_multiple_of(*c)).expect("1 divides every width")
    }

    /// `g=…,r=…` of the base, and its sinks if it has any, so that all settings see the same tokens dense.
    fn window(&self) -> String {
        let Flush { group, residual, sinks } = self.base.flush;
        let sinks = if sinks > 0 { format!(",sinks={sinks}") } else { String::new() };
        format!("g={group},r={residual}{sinks}")
    }

    /// Key settings of the metric link: at 2, 3 and 4 bits, and for `grid` one more, which is what the others spend on scales where
    /// 32 numbers share a scale and a zero.
    pub fn key_settings(&self) -> Vec<Scheme> {
        let (w, c) = (self.window(), self.channels());
        let half = if c.is_multiple_of(2) { c / 2 } else { c };
        let at = |b: u32| {
            [
                format!("kivi-{b}({w})"),
                format!("kivi-{b}({w},range=0.85)"),
                format!("token-{b}({w},c={c})"),
                format!("token-{b}({w},c={c},center)"),
                format!("rotated-{b}({w},c={half})"),
                format!("grid-{}({w},c=1)", b + 1),
                format!("grid-{}({w},c=1,center)", b + 1),
                format!("grid-{}({w})", b + 1),
            ]
        };
        (2..=4).flat_map(at).map(scheme).collect()
    }

    /// Value settings of the metric link: uniform at 1 to 4 bits, every mixed policy at 2 and 3 mean bits.
    pub fn value_settings(&self) -> Vec<Scheme> {
        let uniform = (1..=4).map(|b| (Policy::Token, b));
        let mixed = (2..=3).flat_map(|b| Policy::ALL.iter().filter(|p| p.mixed()).map(move |p| (*p, b)));
        uniform.chain(mixed).map(|(policy, bits)| self.alone(policy, bits)).collect()
    }

    /// A value policy beside dense keys, with the base's window.
    fn alone(&self, policy: Policy, bits: u32) -> Scheme {
        let window = self.even(policy).unwrap_or_else(|| self.window());
        scheme(format!("dense/{policy}-{bits}(c={},{window})", self.channels()))
    }

    /// A value policy beside coded keys, whose window it follows.
    fn beside(&self, key: Scheme, policy: Policy, bits: u32) -> Scheme {
        let window = self.even(policy).map_or(String::new(), |w| format!(",{w}"));
        scheme(format!("{key}/{policy}-{bits}(c={}{window})", self.channels()))
    }

    /// The window of a mixed policy, which needs an even group, where the base's group is odd.
    fn even(&self, policy: Policy) -> Option<String> {
        let Flush { group, residual, sinks } = self.base.flush;
        let odd = policy.mixed() && !group.is_multiple_of(2);
        odd.then(|| format!("g={},r={residual},sinks={sinks}", group + 1))
    }

    /// Quantizers of the null-space link, which all code k − μ + αμ, and whether they are shift-equivariant: the static grid, the same
    /// with the attention sinks dense (their keys lie far from the others' mean), and one that keeps wide scales and zeros, because
    /// rounding a zero to half precision is not equivariant.
    pub fn null_space(&self) -> [(Scheme, bool); 3] {
        let Flush { group, residual, sinks } = self.base.flush;
        let (w, bits) = (self.window(), (self.base.bits.ceil() + 1).min(8));
        let more = sinks + 4;
        [
            (scheme(format!("grid-{bits}({w},c=1,center)")), false),
            (scheme(format!("grid-{bits}(g={group},r={residual},sinks={more},c=1,center)")), false),
            (scheme(format!("kivi-{}({w},center,meta=f32)", self.base.bits.ceil())), true),
        ]
    }

    /// The base alone.
    pub fn uncorrected(&self) -> Scheme {
        scheme(self.base.to_string())
    }

    /// The base with a correction of a family.
    pub fn corrected(&self, family: Family) -> Scheme {
        scheme(format!("{}+{family}(rank={},bits={})", self.base, self.rank, self.bits))
    }

    /// The query-pca correction, subtracted.
    pub fn flipped(&self) -> Scheme {
        scheme(format!("{}+{}(rank={},bits={},sign=-1)", self.base, Family::QueryPca, self.rank, self.bits))
    }

    /// Families in closed form, all at the same budget.
    pub fn families() -> impl Iterator<Item = Family> {
        Family::ALL.iter().copied().filter(|f| *f != Family::Learned)
    }

    /// One more bit for everything; `None` where that is more than the quantizer has.
    fn one_more_bit(&self) -> Option<Scheme> {
        let most = if self.base.quantizer == Quantizer::Klt { MOST_KLT_BITS } else { 8 };
        let bits = self.base.bits.one_more();
        (bits <= Bits::whole(most)).then(|| scheme(BaseScheme { bits, ..self.base }.to_string()))
    }

    /// Rows of the perplexity link after `dense`: what each is there for, its scheme, and the scheme that it is compared with.
    pub fn perplexity_rows(&self) -> Vec<(Role, Scheme, Option<Scheme>)> {
        let base = self.uncorrected();
        let against = |role, s| (role, s, Some(base));
        let mut rows = vec![(Role::Base, base, None)];
        rows.extend(
            Self::families().filter(|f| *f != Family::Random).map(|f| against(Role::Corrected, self.corrected(f))),
        );
        rows.push(against(Role::Control, self.corrected(Family::Random)));
        rows.push(against(Role::Control, self.flipped()));
        rows.extend(self.one_more_bit().map(|s| against(Role::Control, s)));
        rows.extend(self.published().into_iter().map(|s| (Role::Published, s, None)));
        // What is no policy of tokens has other bits at the same name, or takes gradients.
        let policies = || Policy::ALL.iter().copied().filter(|p| !matches!(p, Policy::Channel | Policy::Klt));
        rows.extend(policies().map(|p| (Role::Values, self.alone(p, 2), None)));
        rows.extend(policies().map(|p| (Role::Full, self.beside(base, p, 2), None)));
        rows.extend(policies().map(|p| {
            let corrected = self.beside(self.corrected(Family::QueryPca), p, 2);
            (Role::FullCorrected, corrected, Some(self.beside(base, p, 2)))
        }));
        rows
    }

    /// KIVI as published (g=32, r=128), and the per-token formats of common runtimes, which code every token at once.
    fn published(&self) -> Vec<Scheme> {
        let c = self.channels();
        let kivi = |b| scheme(format!("kivi-{b}(g=32,r=128)/token-{b}(c={c})"));
        let runtime = |b| scheme(format!("token-{b}(g=1,r=0,c={c})/token-{b}(c={c})"));
        vec![kivi(2), kivi(4), runtime(8), runtime(4)]
    }

    /// Tokens that a window must have for the base to code anything.
    pub fn least_context(&self) -> usize {
        let Flush { group, residual, sinks } = self.base.flush;
        group + residual + sinks
    }
}

impl Default for Plan {
    fn default() -> Self {
        let flush = Flush::default();
        let base = BaseScheme {
            quantizer: Quantizer::Kivi,
            bits: Bits::whole(2),
            flush,
            channels: None,
            range: 1.0,
            ranges: RangeSource::Group,
            metric: Metric::default(),
            pool: Pool::default(),
            rounding: Rounding::Nearest,
            center: false,
            meta: Meta::F16,
        };
        Self { base, rank: 4, bits: 4, head_dim: 64 }
    }
}

#[cfg(test)]
mod tests {
    use headq::budget::{Budget, HeadShape};

    use super::*;

    fn plan(head_dim: usize, base: &str) -> Plan {
        Plan { head_dim, base: base.parse().unwrap(), rank: 2, ..Plan::default() }
    }

    #[test]
    fn every_scheme_fits_every_head_width() {
        for head_dim in [2, 3, 7, 16, 24, 40, 64, 80, 96, 128, 256] {
            for base in [
                "kivi-2(g=32,r=32)",
                "kivi-8(g=7,r=0,sinks=4)",
                "token-1",
                "grid-3(center)",
                "rotated-2(g=64)",
                "klt-1.5",
                "klt-6",
            ] {
                let plan = plan(head_dim, base);
                let null = plan.null_space().map(|(s, _)| s);
                let rows = plan.perplexity_rows();
                let all = plan.key_settings().into_iter().chain(plan.value_settings()).chain(null);
                all.chain(rows.iter().map(|r| r.1)).for_each(|s| s.check(head_dim).unwrap());
                assert!(
                    rows.iter()
                        .all(|(_, s, reference)| reference.is_none_or(|r| rows.iter().any(|o| o.1 == r) && r != *s))
                );
            }
        }
    }

    #[test]
    fn settings_of_one_group_have_one_budget_at_common_widths() {
        for head_dim in [32, 64, 96, 128, 256] {
            let shape = HeadShape { layers: 1, heads: 1, kv_heads: 1, head_dim };
            let bits: Vec<f64> = plan(head_dim, "kivi-2(g=32,r=32)")
                .key_settings()
                .iter()
                .map(|s| Budget::of(s, &shape, 512).key_bits)
                .collect();
            assert_eq!(bits, [3.0, 4.0, 5.0].map(|b| [b; 8]).concat(), "{head_dim}");
        }
    }
}
