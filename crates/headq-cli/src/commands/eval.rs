//! `headq eval`

use headq_lab::artifact::{Output, check_writable, write_atomic};
use headq_lab::evaluate::{Forget, Request, Sources};
use headq_lab::scheme_file::resolve;
use headq_lab::{LabError, overlap, report};

use super::Context;
use crate::args::Eval;

pub fn run(context: &Context, args: &Eval) -> Result<(), LabError> {
    for scheme in &args.scheme {
        resolve(scheme)?;
    }
    let decode = args.decode.then_some(args.cache_dtype);
    let (loaded, windows) = context.load(&args.model, &args.text)?;
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
        decode,
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
