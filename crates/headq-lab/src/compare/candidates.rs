//! What is compared: bases put in the place of a scheme's side family, each checked against the model and the base quantizer.

use std::path::{Path, PathBuf};

use headq::KeyStatistics;
use headq::basis::Basis;
use headq::scheme::{BaseScheme, Family, KeyScheme, Scheme, SideScheme, Sign};
use headq_models::ModelConfig;

use crate::LabError;
use crate::artifact::{BasisArtifact, Header};
use crate::calibrate::check_base;
use crate::evaluate::{PlannedScheme, Sources, artifact_agrees, same_base};

/// A comparison as asked for, checked as far as it can be without a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Asked {
    scheme: Scheme,
    key: KeyScheme,
    side: SideScheme,
    families: Vec<Family>,
}

impl Asked {
    /// A scheme with a side code, the basis files that will be put into it, and families to derive.
    ///
    /// # Errors
    /// [`LabError::Method`] for a malformed scheme; [`LabError::Usage`] for one without a side code, a family that is unknown or
    /// cannot be derived, a file or family given twice, or neither.
    pub fn new<P: AsRef<Path>>(scheme: &str, files: &[P], families: &[String]) -> Result<Self, LabError> {
        let asked = Self::with_training(scheme, files, families)?;
        match asked.trains() {
            true => Err(LabError::Usage(
                "family learned: such a basis is trained, not derived from statistics; give its file".into(),
            )),
            false => Ok(asked),
        }
    }

    /// The same where a basis may be trained for the scheme: the family `learned` stands for it.
    ///
    /// # Errors
    /// As [`Asked::new`].
    pub fn with_training<P: AsRef<Path>>(scheme: &str, files: &[P], families: &[String]) -> Result<Self, LabError> {
        let usage = |reason: String| Err(LabError::Usage(reason));
        let scheme = crate::scheme_file::resolve(scheme)?;
        let Some((key, side)) = scheme.key.and_then(|key| Some((key, key.side?))) else {
            return usage(format!(
                "scheme '{scheme}' has no side code that a basis could be put into; give one, e.g. \
                 'kivi-2(g=32,r=32)+query-pca(rank=4,bits=4)'"
            ));
        };
        if files.is_empty() && families.is_empty() {
            return usage("nothing to compare: give at least one basis file or family".into());
        }
        if let Some(path) = repeated(files.iter().map(|p| real(p.as_ref()))) {
            return usage(format!("basis {} is given twice; a basis is compared with others", path.display()));
        }
        let parsed =
            families.iter().map(|name| name.parse().map_err(|e: String| LabError::Usage(format!("family {e}"))));
        let families: Vec<Family> = parsed.collect::<Result<_, _>>()?;
        if let Some(family) = repeated(families.iter().copied()) {
            return usage(format!("family {family} is given twice; a basis is compared with others"));
        }
        Ok(Self { scheme, key, side, families })
    }

    /// The base quantizer.
    pub fn base(&self) -> &BaseScheme {
        &self.key.base
    }

    /// The scheme as asked for.
    pub fn scheme(&self) -> &Scheme {
        &self.scheme
    }

    /// Families to derive.
    pub fn families(&self) -> &[Family] {
        &self.families
    }

    /// Whether a basis is to be trained.
    pub fn trains(&self) -> bool {
        self.families.contains(&Family::Learned)
    }

    /// The scheme, without values, in which a basis is trained: its side code at its rank, scope, bits and scales, and never subtracted.
    pub fn trained_scheme(&self) -> Scheme {
        let side = SideScheme { family: Family::Learned, sign: Sign::default(), ..self.side };
        Scheme { value: None, ..self.with_side(side) }
    }

    /// Whether statistics are needed: for families, or for means and scales of a static base quantizer.
    pub fn needs_statistics(&self) -> bool {
        !self.families.is_empty() || self.scheme.needs_statistics()
    }

    /// The scheme without its side code.
    pub fn base_scheme(&self) -> Scheme {
        Scheme { key: Some(KeyScheme { side: None, ..self.key }), ..self.scheme }
    }

    /// The scheme with another family, rank and scope.
    fn with_side(&self, side: SideScheme) -> Scheme {
        Scheme { key: Some(KeyScheme { side: Some(side), ..self.key }), ..self.scheme }
    }

    /// Fails where windows of `context` tokens hold no key that is coded and then read for a scored token, or the scheme does not
    /// fit the model.
    ///
    /// # Errors
    /// [`LabError::Usage`] saying what would do; [`LabError::Method`] naming what does not fit.
    pub fn check(&self, context: usize, config: &ModelConfig) -> Result<(), LabError> {
        self.scheme.check(config.head_dim)?;
        check_base(&self.key.base, context, config.head_dim)?;
        let flush = self.key.base.flush;
        let least = flush.sinks + flush.group + flush.residual + 1;
        match context < least {
            true => Err(LabError::Usage(format!(
                "windows of {context} tokens are read dense throughout under {}; give a context of at least {least}",
                self.key.base
            ))),
            false => Ok(()),
        }
    }

    /// Every basis in the scheme, files first, then families derived from the statistics among the sources.
    ///
    /// A basis brings its family, rank and scope; bits, scales and sign of the side code are the scheme's. Derived bases have the
    /// scheme's rank and scope.
    ///
    /// # Errors
    /// If a basis does not fit the model, the side code or the base quantizer, or statistics are missing or given in vain.
    pub fn candidates(&self, sources: &Sources, config: &ModelConfig, seed: u64) -> Result<Candidates, LabError> {
        self.scheme.check(config.head_dim)?;
        self.check_statistics(sources)?;
        let keys = match self.scheme.needs_statistics() {
            true => Some(sources.key_statistics(&self.scheme)?),
            false => None,
        };
        let mut all = Vec::new();
        for (path, artifact) in &sources.bases {
            sources.check_calibration(path, artifact, &self.scheme)?;
            all.push(self.given(path, artifact, config, keys.clone())?);
        }
        for family in &self.families {
            all.push(match family {
                Family::Learned => self.trained(sources, config, keys.clone())?,
                derived => self.derived(*derived, sources, config, seed, keys.clone())?,
            });
        }
        Ok(Candidates { base: planned(self.base_scheme(), None, keys), all })
    }

    fn check_statistics(&self, sources: &Sources) -> Result<(), LabError> {
        match (sources.stats.is_empty(), self.needs_statistics()) {
            (true, true) if !self.families.is_empty() => Err(LabError::Usage(format!(
                "family {}: deriving it needs statistics: give --stats (from headq calibrate)",
                self.families[0]
            ))),
            (false, false) => Err(LabError::Artifact {
                path: sources.stats[0].0.clone(),
                reason: "the comparison has no use for statistics; name families to derive, or leave it out".into(),
            }),
            _ => Ok(()),
        }
    }

    /// Checks the basis files among the sources against the model, the side code and the base quantizer.
    ///
    /// # Errors
    /// [`LabError::Artifact`] naming the file and what disagrees.
    pub fn check_files(&self, sources: &Sources, config: &ModelConfig) -> Result<(), LabError> {
        sources.bases.iter().try_for_each(|(path, artifact)| self.side_of(path, artifact, config).map(|_| ()))
    }

    /// The side code with a basis in it.
    fn side_of(&self, path: &Path, artifact: &BasisArtifact, config: &ModelConfig) -> Result<SideScheme, LabError> {
        let fail = |reason: String| LabError::Artifact { path: path.to_owned(), reason };
        let Basis { family, rank, scope, .. } = artifact.basis;
        if rank == 0 || rank > config.head_dim {
            return Err(fail(format!("rank {rank} is outside 1 to the head width {}", config.head_dim)));
        }
        let side = SideScheme { family, rank, scope, ..self.side };
        artifact_agrees(artifact, &self.key.base, &side, config).map_err(fail)?;
        Ok(side)
    }

    fn given(
        &self,
        path: &Path,
        artifact: &BasisArtifact,
        config: &ModelConfig,
        keys: Option<KeyStatistics>,
    ) -> Result<Candidate, LabError> {
        let side = self.side_of(path, artifact, config)?;
        let name = path.to_string_lossy().into_owned();
        Ok(Candidate {
            artifact: name.clone(),
            name,
            derived: false,
            header: artifact.header.clone(),
            planned: planned(self.with_side(side), Some(artifact.basis.clone()), keys),
        })
    }

    /// The basis that was trained for the scheme.
    fn trained(
        &self,
        sources: &Sources,
        config: &ModelConfig,
        keys: Option<KeyStatistics>,
    ) -> Result<Candidate, LabError> {
        let (path, artifact) = sources.trained.as_ref().expect("a family to be trained comes with its basis");
        let candidate = self.given(path, artifact, config, keys)?;
        Ok(Candidate { name: Family::Learned.to_string(), ..candidate })
    }

    fn derived(
        &self,
        family: Family,
        sources: &Sources,
        config: &ModelConfig,
        seed: u64,
        keys: Option<KeyStatistics>,
    ) -> Result<Candidate, LabError> {
        let side = SideScheme { family, ..self.side };
        let (path, stats) = sources.stats.first().expect("families were checked to have statistics");
        let fail = |reason: String| LabError::Artifact { path: path.clone(), reason };
        same_base(&side, &self.key.base, &stats.header.base).map_err(fail)?;
        let artifact = BasisArtifact::fit(stats, family, side.rank, side.scope, seed)?;
        artifact_agrees(&artifact, &self.key.base, &side, config).map_err(fail)?;
        Ok(Candidate {
            name: family.to_string(),
            artifact: path.to_string_lossy().into_owned(),
            derived: true,
            header: artifact.header,
            planned: planned(self.with_side(side), Some(artifact.basis), keys),
        })
    }
}

fn planned(scheme: Scheme, basis: Option<Basis>, keys: Option<KeyStatistics>) -> PlannedScheme {
    PlannedScheme { asked: scheme.to_string(), scheme, basis, keys }
}

/// The file that a path leads to, so that two ways of writing it are one.
fn real(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_owned())
}

/// The first item that occurred before.
fn repeated<T: PartialEq>(items: impl Iterator<Item = T>) -> Option<T> {
    let mut seen = Vec::new();
    for item in items {
        if seen.contains(&item) {
            return Some(item);
        }
        seen.push(item);
    }
    None
}

/// A basis in the scheme.
#[derive(Debug, Clone)]
pub struct Candidate {
    /// Its file as given, or its family where it was derived.
    pub name: String,
    /// The artifact that it came from.
    pub artifact: String,
    /// Whether it was derived from statistics here.
    pub derived: bool,
    /// Of its artifact, or as it would be.
    pub header: Header,
    /// The scheme with it.
    pub planned: PlannedScheme,
}

impl Candidate {
    /// The basis.
    ///
    /// # Panics
    /// Never: a candidate is made with its basis.
    pub fn basis(&self) -> &Basis {
        self.planned.basis.as_ref().expect("a candidate is made with its basis")
    }
}

/// Everything that is evaluated, but for the dense model.
#[derive(Debug, Clone)]
pub struct Candidates {
    /// The scheme without a side code.
    pub base: PlannedScheme,
    /// The bases, in order.
    pub all: Vec<Candidate>,
}

#[cfg(test)]
mod tests {
    use super::*;

    const SCHEME: &str = "kivi-2(g=8,r=4)+query-pca(rank=4,bits=3,scales=token)/token-2(c=8)";

    fn fails(scheme: &str, files: &[&str], families: &[&str], part: &str) {
        let families: Vec<String> = families.iter().map(ToString::to_string).collect();
        let error = Asked::new(scheme, files, &families).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }

    #[test]
    fn what_cannot_be_compared_is_refused() {
        fails("kivi-2(g=8,r=4)", &["a"], &[], "no side code");
        fails("dense", &["a"], &[], "no side code");
        fails("kivi-9", &["a"], &[], "from 1 to 8");
        fails(SCHEME, &[], &[], "nothing to compare");
        fails(SCHEME, &["a", "b", "a"], &[], "basis a is given twice");
        fails(SCHEME, &[], &["random", "random"], "family random is given twice");
        fails(SCHEME, &[], &["pca"], "family 'pca' is not known; known are query-pca");
        fails(SCHEME, &[], &["learned"], "trained");
    }

    #[test]
    fn the_base_keeps_everything_but_the_side_code() {
        let asked = Asked::new(SCHEME, &["a"], &[]).unwrap();
        assert_eq!(asked.base_scheme().to_string(), "kivi-2(g=8,r=4)/token-2(c=8)");
        assert_eq!(asked.scheme().to_string(), SCHEME);
        assert!(!asked.needs_statistics());
        assert!(Asked::new(SCHEME, &["a"], &["random".into()]).unwrap().needs_statistics());
        assert!(Asked::new("grid-3+random(rank=2,bits=4)", &["a"], &[]).unwrap().needs_statistics());
    }
}
