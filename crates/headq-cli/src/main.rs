//! The `headq` program.

mod args;
mod commands;
mod progress;

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;
use headq_lab::LabError;

use crate::args::{Cli, Command};

fn main() -> ExitCode {
    let cli = Cli::parse();
    start_logging(cli.global.quiet);
    // A server is ended by Burn's own handlers.
    if !matches!(cli.command, Command::Serve(_)) {
        let doing = match cli.command {
            Command::Generate(_) => "finishing the token in flight",
            Command::Pull(_) => "keeping what has arrived",
            _ => "finishing the windows in flight",
        };
        progress::catch_interrupts(cli.global.quiet, doing);
    }
    let context = commands::Context::new(cli.global);
    let result = match &cli.command {
        Command::Inspect(args) => commands::inspect::run(&context, args),
        Command::Calibrate(args) => commands::calibrate::run(&context, args),
        Command::Basis(args) => commands::basis::run(&context, args),
        Command::Eval(args) => commands::eval::run(&context, args),
        Command::Compare(args) => commands::compare::run(&context, args),
        Command::Sweep(args) => commands::sweep::run(&context, args),
        Command::Diagnose(args) => commands::diagnose::run(&context, args),
        Command::Finetune(args) => commands::finetune::run(&context, args),
        Command::Search(args) => commands::search::run(&context, args),
        Command::Generate(args) => commands::generate::run(&context, args),
        Command::Bench(args) => commands::bench::run(&context, args),
        Command::Report(args) => commands::report::run(&context, args),
        Command::Pull(args) => commands::pull::run(&context, args),
        Command::Run(args) => commands::run::run(&context, args),
        Command::Devices(args) => commands::devices::run(&context, args),
        Command::Serve(args) => commands::serve::run(&context, args),
        Command::Suite(args) => commands::suite::run(&context, args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Nothing is left to tell where standard error is closed.
            let _ = writeln!(std::io::stderr(), "error: {}", error.to_string().replace(['\n', '\r'], " "));
            ExitCode::from(exit_status(&error))
        }
    }
}

/// 2 for wrong usage, 1 otherwise.
fn exit_status(error: &LabError) -> u8 {
    match error {
        LabError::Usage(_) | LabError::Method(headq::Error::Scheme { .. } | headq::Error::DeviceName { .. }) => 2,
        _ => 1,
    }
}

/// Logs go to standard error; `HEADQ_LOG` sets what is shown, in the syntax of tracing's `EnvFilter`.
fn start_logging(quiet: bool) {
    use tracing_subscriber::EnvFilter;
    let default = if quiet { "error" } else { "warn" };
    let filter = EnvFilter::try_from_env("HEADQ_LOG").unwrap_or_else(|_| EnvFilter::new(default));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
        .without_time()
        .with_target(false)
        .init();
}
