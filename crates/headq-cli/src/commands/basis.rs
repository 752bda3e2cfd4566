//! `headq basis`

use headq::scheme::{Family, Scope};
use headq_lab::LabError;
use headq_lab::artifact::{BasisArtifact, StatsArtifact, check_writable};

use super::Context;
use crate::args::Basis;

pub fn run(context: &Context, args: &Basis) -> Result<(), LabError> {
    let usage = |what: &str, reason: String| LabError::Usage(format!("{what}: {reason}"));
    let family: Family = args.family.parse().map_err(|e| usage("--family", e))?;
    let scope: Scope = args.scope.parse().map_err(|e| usage("--scope", e))?;
    check_writable(&args.out)?;
    let stats = StatsArtifact::load(&args.stats)?;
    let basis = BasisArtifact::fit(&stats, family, args.rank, scope, context.seed())?;
    basis.save(&args.out)?;
    context.print(
        || serde_json::json!({ "out": args.out.to_string_lossy(), "header": super::json(&basis.header) }),
        || format!("{}: {family}, rank {}, of {}", args.out.display(), args.rank, basis.header.model),
    )
}
