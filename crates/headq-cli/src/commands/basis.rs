//! `headq basis`

use headq::scheme::{Family, Scope};
use headq_lab::LabError;
use headq_lab::artifact::{BasisArtifact, Output, StatsArtifact, check_writable};

use super::Context;
use crate::args::Basis;

pub fn run(context: &Context, args: &Basis) -> Result<(), LabError> {
    let usage = |what: &str, reason: String| LabError::Usage(format!("{what}: {reason}"));
    let family: Family = args.family.parse().map_err(|e| usage("--family", e))?;
    if family == Family::Learned {
        return Err(LabError::Usage("--family learned: such a basis is trained, not derived from statistics".into()));
    }
    let scope: Scope = args.scope.parse().map_err(|e| usage("--scope", e))?;
    let stats = StatsArtifact::load(&args.stats)?;
    let basis = BasisArtifact::fit(&stats, family, args.rank, scope, context.seed())?;
    check_writable(&args.out, Output::Basis)?;
    basis.save(&args.out)?;
    context.print(
        || serde_json::json!({ "out": args.out.to_string_lossy(), "header": super::json(&basis.header) }),
        || format!("{}: {family}, rank {}, of {}", args.out.display(), args.rank, basis.header.model),
    )
}
