//! Models of the Hugging Face hub by name, `hf:ORG/NAME[@REV][:FILE]`.
//!
//! [`Hub::pull`] fetches the files that a model needs and no others, checks each against the checksum that the hub lists, and
//! keeps them where `huggingface_hub` and other tools do, so that a model is stored once. [`Hub::locate`] does so only where the
//! model is not there yet. The usual environment variables are honoured, see [`Settings::from_env`].
//!
//! ```no_run
//! use headq_hub::{Hub, Settings};
//!
//! # fn main() -> Result<(), headq_hub::HubError> {
//! let hub = Hub::new(Settings::from_env()?);
//! let folder = hub.locate(&"hf:HuggingFaceTB/SmolLM2-135M".parse()?, &())?;
//! println!("{}", folder.display());
//! # Ok(())
//! # }
//! ```
//!
//! Addresses, requests to the hub's API and the layout of the cache are the `hf-hub` crate's. Its own download (as of version
//! 0.5) trusts what arrives: it knows no checksums and no timeouts, appends a whole file to a part where a server ignores the
//! range, and resumes a part from its beginning if the first attempt fails. Files are therefore fetched here, into
//! `blobs/CHECKSUM.incomplete`, which gets its name only after it is complete and right.

mod cache;
mod error;
mod fetch;
mod name;
mod pull;
mod select;
mod settings;

pub use error::HubError;
pub use name::HubName;
pub use pull::{Hub, Pulled, PulledFile};
pub use settings::{SILENCE, Settings};

/// Watches downloads, and may stop them.
pub trait Progress {
    /// A file of `size` bytes is fetched, of which `have` are there from an earlier attempt.
    fn begin(&self, file: &str, size: u64, have: u64);
    /// So many more bytes have arrived.
    fn advance(&self, bytes: u64);
    /// The file is complete, or given up.
    fn end(&self);
    /// Whether to stop; what has arrived is kept for the next attempt.
    fn cancelled(&self) -> bool;
}

/// Shows nothing and never stops.
impl Progress for () {
    fn begin(&self, _: &str, _: u64, _: u64) {}
    fn advance(&self, _: u64) {}
    fn end(&self) {}
    fn cancelled(&self) -> bool {
        false
    }
}
