//! `headq pull`

use std::fmt::Write;

use headq_lab::LabError;
use headq_lab::hub::pull;
use indicatif::DecimalBytes;

use super::Context;
use crate::args::Pull;

pub fn run(context: &Context, args: &Pull) -> Result<(), LabError> {
    let pulled = pull(&args.model, &context.bars)?;
    context.print(
        || super::json(&pulled),
        || {
            let mut text = format!("{} at {}\n", args.model, pulled.commit);
            for file in &pulled.files {
                let _ = writeln!(text, "{}  {:>10}  {}", file.sha256, DecimalBytes(file.size).to_string(), file.name);
            }
            let downloaded = DecimalBytes(pulled.bytes_downloaded);
            let _ = write!(text, "{downloaded} downloaded, all files checked: {}", pulled.model.display());
            text
        },
    )
}
