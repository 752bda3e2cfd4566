//! `headq calibrate`

use headq::scheme::BaseScheme;
use headq_lab::artifact::{Output, check_writable};
use headq_lab::calibrate::check_base;
use headq_lab::{LabError, calibrate};

use super::{Context, Need};
use crate::args::Calibrate;

pub fn run(context: &Context, args: &Calibrate) -> Result<(), LabError> {
    let base: BaseScheme = args.base.parse().map_err(LabError::Method)?;
    let need = if args.gradients { Need::Gradients } else { Need::Passes };
    let (loaded, windows) = context.load_for(&args.model, &args.text, need)?;
    check_base(&base, args.text.context, loaded.config().head_dim)?;
    check_writable(&args.out, Output::Statistics)?;
    let stats = calibrate(
        &loaded.model,
        &loaded.fingerprint,
        &windows,
        args.text.add_bos,
        base,
        args.gradients.then(|| context.seed()),
        context.threads,
        &context.bars,
    )?;
    stats.save(&args.out)?;
    let out = args.out.display();
    context.print(
        || serde_json::json!({ "out": args.out.to_string_lossy(), "header": super::json(&stats.header) }),
        || format!("{out}: statistics of {} tokens, residuals of {}", stats.header.tokens, stats.header.base),
    )
}
