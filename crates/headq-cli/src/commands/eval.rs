//! `headq eval`

use headq::{DenseType, DeviceName};
use headq_lab::artifact::{Output, check_writable, write_atomic};
use headq_lab::evaluate::{Forget, Request, Sources};
use headq_lab::pass::Pass;
use headq_lab::scheme_file::resolve;
use headq_lab::{LabError, overlap, report};

use super::{Context, Need};
use crate::args::{Eval, PassName};

pub fn run(context: &Context, args: &Eval) -> Result<(), LabError> {
    check_pass(context, args)?;
    let dense = args.cache_dtype.unwrap_or(DenseType::F32);
    let schemes = args.scheme.iter().map(|scheme| resolve(scheme)).collect::<Result<Vec<_>, _>>()?;
    let need = if packed(context, args) { Need::Caches(&schemes, dense) } else { Need::Passes };
    let (loaded, windows) = context.load_for(&args.model, &args.text, need)?;
    let pass = match (args.decode, args.pass) {
        (true, _) => Pass::Decode(dense),
        (false, Some(PassName::Tensors)) => Pass::Tensors,
        (false, Some(PassName::Packed)) => Pass::Packed(dense),
        (false, None) => match Pass::of(&loaded.model) {
            Pass::Packed(_) => Pass::Packed(dense),
            other => other,
        },
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

/// Whether schemes will go through packed caches, as far as is known before the model is loaded.
fn packed(context: &Context, args: &Eval) -> bool {
    let host = context.device.as_ref().unwrap_or(&DeviceName::Flex) == &DeviceName::Flex;
    args.decode || args.pass == Some(PassName::Packed) || host && args.pass.is_none()
}

/// Fails where a pass is asked for that the device does not have, or a cache's type without a cache.
fn check_pass(context: &Context, args: &Eval) -> Result<(), LabError> {
    let device = context.device_name();
    if args.pass == Some(PassName::Packed) && device != DeviceName::Flex.to_string() {
        return Err(LabError::Usage(format!(
            "--pass packed runs in this machine's memory and not on {device}: take --device flex, --pass tensors, or --decode for the packed cache token by token"
        )));
    }
    if let Some(dtype) = args.cache_dtype.filter(|_| !packed(context, args)) {
        return Err(LabError::Usage(format!(
            "--cache-dtype {dtype} is for packed caches, and this evaluation goes through tensors: leave it out, or take --pass packed on --device flex, or --decode"
        )));
    }
    Ok(())
}
