//! `headq eval`

use headq::DenseType;
use headq_lab::artifact::{Output, check_writable, write_atomic};
use headq_lab::evaluate::{Forget, Request, Sources};
use headq_lab::pass::{Pass, PassName};
use headq_lab::scheme_file::resolve;
use headq_lab::{LabError, overlap, report};

use super::{Context, Need};
use crate::args::Eval;

pub fn run(context: &Context, args: &Eval) -> Result<(), LabError> {
    let schemes = args.scheme.iter().map(|scheme| resolve(scheme)).collect::<Result<Vec<_>, _>>()?;
    let dense = args.cache_dtype.unwrap_or(DenseType::F32);
    // What a pass on the host takes; another device has memory of its own.
    let need = if args.pass == Some(PassName::Tensors) { Need::Passes } else { Need::Caches(&schemes, dense) };
    let (loaded, windows) = context.load_for(&args.model, &args.text, need)?;
    let pass = match args.decode {
        true => Pass::Decode(dense),
        false => Pass::choose(args.pass, args.cache_dtype, &loaded.model, &context.device_name())?,
    };
    let sources = Sources::load(&args.stats, &args.basis, &loaded.fingerprint)?
        .with_scheme_files(&args.scheme, &loaded.fingerprint)?;
    let schemes = sources.plan_all(&args.scheme, loaded.config(), context.seed())?;
    let overlap = overlap::check(&windows, args.text.add_bos, &sources.made_from(), args.overlap.allow_overlap)?;
    args.out.as_deref().map_or(Ok(()), |out| check_writable(out, Output::Report))?;
    let request = Request {
        model: &loaded.model,
        fingerprint: &loaded.fingerprint,
        name: args.model.display().to_string(),
        device: context.device_label(&loaded)?,
        texts: &windows,
        add_bos: args.text.add_bos,
        overlap,
        schemes: &schemes,
        seed: context.seed(),
        diagnostics: !args.no_diagnostics,
        threads: context.threads,
        timings: args.timings,
        pass,
    };
    let evaluation = request.run(&context.bars, &Forget)?;
    let json = || super::json(&evaluation);
    if let Some(out) = &args.out {
        write_atomic(out, format!("{:#}\n", json()).as_bytes())?;
    }
    context.print(json, || {
        format!("{}\n{}", report::provenance(&evaluation).join("\n"), report::table(&evaluation, false))
    })
}
