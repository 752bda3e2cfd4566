//! `headq serve`

use headq_lab::LabError;

use super::Context;
use crate::args::Serve;

#[cfg(not(feature = "remote"))]
pub fn run(_: &Context, _: &Serve) -> Result<(), LabError> {
    let reason = "this build has no remote backend; build with `cargo build --release --features remote`".into();
    Err(headq::Error::Device { device: "remote".into(), reason }.into())
}

#[cfg(feature = "remote")]
pub fn run(context: &Context, args: &Serve) -> Result<(), LabError> {
    use std::net::TcpListener;
    use std::path::Path;

    use burn::server::{RemoteServer, TokenAuthorizer, WebSocketTransport};
    use headq::DeviceName;
    use headq::device::{Precision, TOKEN_VARIABLE};
    use serde_json::json;

    let name: DeviceName = context.device_name().parse()?;
    if matches!(name, DeviceName::Remote { .. }) {
        return Err(LabError::Usage(format!("device '{name}': a remote device cannot be lent on; serve where it is")));
    }
    let device = context.device(&context.device_name())?;
    let label = name.label(&device, Precision::F32);
    let cannot = LabError::io(Path::new(&args.listen));
    let (listener, address) =
        TcpListener::bind(&args.listen).and_then(|l| l.local_addr().map(|a| (l, a))).map_err(cannot)?;

    let mut server = RemoteServer::new([device]);
    match std::env::var(TOKEN_VARIABLE) {
        Ok(token) => {
            let authorizer = TokenAuthorizer::new(token)
                .map_err(|_| LabError::Usage(format!("{TOKEN_VARIABLE} is set but empty; unset it or give a token")))?;
            server = server.with_authorizer(authorizer);
        }
        Err(_) if !address.ip().is_loopback() => {
            tracing::warn!("anyone who reaches {address} can use this device; set {TOKEN_VARIABLE} on both sides");
        }
        Err(_) => {}
    }
    let url = format!("ws://{address}");
    context.print(
        || json!({ "device": label, "url": url }),
        || format!("{label} is served at {url}; use it with --device remote:{url}; Ctrl-C ends"),
    )?;
    server
        .serve(WebSocketTransport::from_listener(listener))
        .map_err(|e| headq::Error::Device { device: label, reason: format!("cannot be served: {e}") }.into())
}
