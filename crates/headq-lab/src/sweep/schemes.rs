//! The schemes that a sweep takes by itself.

use headq::Scheme;
use headq::scheme::{Metric, Pool, RangeSource, Rounding};

use super::data::Coded;

/// Sizes that all of them share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// First tokens that stay dense.
    pub sinks: usize,
    /// Newest tokens that stay dense.
    pub residual: usize,
    /// Width of a head.
    pub head_dim: usize,
}

/// Tokens that per-channel quantizers code together.
const GROUPS: [usize; 2] = [32, 128];
/// Channels that share a scale, where heads are wider.
const CHANNELS: usize = 32;

/// Transforms in nats, their bits shared by the whole model.
const IN_NATS: &str = "ranges=lloyd,metric=fisher,pool=model";
/// Mean bits of those.
const POOLED: [f64; 8] = [0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0];

impl Sizes {
    fn base(&self, name: &str, bits: impl std::fmt::Display, group: usize, more: &str) -> String {
        let comma = if more.is_empty() { "" } else { "," };
        format!("{name}-{bits}(g={group},r={},sinks={}{comma}{more})", self.residual, self.sinks)
    }

    /// Options of values, or keys, that share scales over fewer channels than a head has; none where it is no wider.
    fn channels(&self) -> Vec<String> {
        let narrow =
            (self.head_dim > CHANNELS && self.head_dim.is_multiple_of(CHANNELS)).then(|| format!("c={CHANNELS}"));
        narrow.into_iter().chain([String::new()]).collect()
    }

    /// Key schemes, family by family, each with its mean bits rounded up.
    fn keys(&self) -> Vec<(u32, String)> {
        const CORRECTIONS: [&str; 2] = ["query-pca", "score-optimal"];
        let mut keys = Vec::new();
        for bits in 1..=4 {
            // Clipped ranges are better where levels are few.
            let range = if bits <= 2 { "range=0.85," } else { "" };
            for group in GROUPS {
                keys.push((bits, self.base("kivi", bits, group, "")));
                keys.push((bits, self.base("kivi", bits, group, &format!("{range}rounding=score-aware,lambda=0.03"))));
            }
            keys.extend(self.channels().iter().map(|c| (bits, self.base("token", bits, GROUPS[0], c))));
            keys.push((bits, self.base("grid", bits, GROUPS[0], "c=1,center")));
            keys.push((bits, self.base("grid", bits, GROUPS[0], "c=1,rounding=score-aware,center")));
            keys.push((bits, self.base("rotated", bits, GROUPS[0], "")));
            // Four bits leave little to correct.
            for correction in CORRECTIONS.iter().filter(|_| bits <= 3) {
                let side = format!("+{correction}(rank=4,bits=4)");
                keys.extend(GROUPS.map(|group| (bits, self.base("kivi", bits, group, "") + &side)));
                keys.push((bits, self.base("token", bits, GROUPS[0], &self.channels()[0]) + &side));
            }
        }
        for bits in [1.0f64, 1.5, 2.0, 2.5, 3.0, 4.0] {
            let ceil = bits.ceil() as u32;
            keys.extend(GROUPS.map(|group| (ceil, self.base("klt", bits, group, ""))));
            keys.push((ceil, self.base("klt", bits, GROUPS[0], "ranges=static")));
        }
        // Scales are counted in B, and few: the larger group alone.
        keys.extend(POOLED.map(|bits| (bits.ceil() as u32, self.base("klt", bits, GROUPS[1], IN_NATS))));
        keys
    }

    /// Value schemes beside keys of so many bits.
    fn values(&self, bits: u32) -> Vec<String> {
        let bits = bits.max(2);
        let policy =
            |name: &str, c: &str| if c.is_empty() { format!("{name}-{bits}") } else { format!("{name}-{bits}({c})") };
        ["token", "a2"].iter().flat_map(|name| self.channels().into_iter().map(move |c| policy(name, &c))).collect()
    }

    /// Every default scheme that codes this; values have the bits of the keys, rounded up, and at least 2.
    pub fn schemes(&self, coded: Coded) -> Vec<String> {
        let keys = self.keys().into_iter();
        match coded {
            Coded::K => keys.map(|(_, key)| key).collect(),
            Coded::Kv => keys
                .flat_map(|(bits, key)| self.values(bits).into_iter().map(move |value| format!("{key}/{value}")))
                .chain(POOLED.map(|bits| {
                    // Errors of values are about as dear as those of keys, but not as easily transformed away.
                    let (keys, values) = (bits * 0.85, bits * 1.15);
                    let key = self.base("klt", format!("{keys:.3}"), GROUPS[1], IN_NATS);
                    format!("{key}/klt-{values:.3}(ranges=lloyd,pool=model)")
                }))
                .collect(),
        }
    }
}

/// What a scheme is, without bits and sizes: base quantizer, how it rounds or where its ranges are from, correction, value policy.
pub fn family(scheme: &Scheme) -> String {
    let mut name = String::from("dense");
    if let Some(key) = &scheme.key {
        name = key.base.quantizer.to_string();
        if key.base.ranges == RangeSource::Static {
            name += " static";
        }
        if key.base.metric == Metric::Fisher {
            name += " in nats";
        }
        if let Pool::Plan(_) = key.base.pool {
            name += ", searched";
        }
        if key.base.rounding != Rounding::Nearest {
            name += " score-aware";
        }
        if let Some(side) = &key.side {
            name += &format!("+{}", side.family);
        }
    }
    if let Some(value) = &scheme.value {
        name += &format!("/{}", value.policy);
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_default_scheme_is_one_and_has_the_same_sinks_and_window() {
        for head_dim in [16, 32, 64, 128] {
            let sizes = Sizes { sinks: 4, residual: 96, head_dim };
            for coded in [Coded::K, Coded::Kv] {
                let schemes: Vec<Scheme> = sizes.schemes(coded).iter().map(|s| s.parse().unwrap()).collect();
                let distinct: BTreeSet<String> = schemes.iter().map(Scheme::to_string).collect();
                assert_eq!(distinct.len(), schemes.len());
                for scheme in schemes {
                    scheme.check(head_dim).unwrap();
                    let flush = scheme.key.unwrap().base.flush;
                    assert_eq!((flush.sinks, flush.residual), (4, 96), "{scheme}");
                    assert_eq!(scheme.value.is_some(), coded == Coded::Kv);
                    assert!(scheme.value.is_none_or(|v| v.flush(scheme.key.as_ref()) == flush), "{scheme}");
                }
            }
        }
    }

    #[test]
    fn families_say_what_a_scheme_is() {
        for (scheme, expected) in [
            ("kivi-2", "kivi"),
            ("kivi-2(rounding=score-aware)+query-pca(rank=4,bits=4)", "kivi score-aware+query-pca"),
            ("klt-1.5(ranges=static)/a2-2", "klt static/a2"),
            ("dense/token-2", "dense/token"),
            ("klt-1.5(metric=fisher,pool=model,ranges=lloyd)/klt-2(pool=model)", "klt in nats/klt"),
        ] {
            assert_eq!(family(&scheme.parse().unwrap()), expected);
        }
    }
}
