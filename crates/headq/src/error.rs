//! Errors of the method crate.

/// What can go wrong in schemes, bases and codecs.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The written form of a scheme does not follow the grammar, names something unknown, or gives a value out of range.
    #[error("scheme '{scheme}': {reason}")]
    Scheme {
        /// The text given.
        scheme: String,
        /// What was expected, what was found, what to do.
        reason: String,
    },
    /// A scheme cannot be applied to a model's heads.
    #[error("scheme '{scheme}' does not fit this model: {reason}")]
    Fit {
        /// The scheme in its written form.
        scheme: String,
        /// What does not fit.
        reason: String,
    },
    /// The written form of a device is not known.
    #[error("device '{device}': {reason}")]
    DeviceName {
        /// The text given.
        device: String,
        /// What was expected.
        reason: String,
    },
    /// A device that cannot be used here.
    #[error("device '{device}': {reason}")]
    Device {
        /// The device in its written form.
        device: String,
        /// What is missing and what to do.
        reason: String,
    },
    /// Means and scales of keys cannot be derived.
    #[error("statistics of keys: {reason}")]
    Keys {
        /// What is missing or wrong.
        reason: String,
    },
    /// A packed cache cannot go back that far.
    #[error(
        "a packed cache cannot be cut to {len} tokens: some that would then be dense are held only as codes; \
         give {shortest} or more, or keep dense copies (PackedCache::with_rewind)"
    )]
    Truncate {
        /// Tokens asked for.
        len: usize,
        /// The shortest length that is possible.
        shortest: usize,
    },
    /// A saved cache cannot be read or written.
    #[error("{file}: {reason}")]
    CacheFile {
        /// The file.
        file: String,
        /// What was expected and found, what to do.
        reason: String,
    },
    /// A basis family cannot be derived.
    #[error("basis {family}: {reason}")]
    Basis {
        /// Family name.
        family: String,
        /// What is missing or wrong.
        reason: String,
    },
}
