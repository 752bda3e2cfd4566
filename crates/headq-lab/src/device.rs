//! Devices by name.

use burn::tensor::Device;

use crate::LabError;

/// Backends this program knows by name, with whether this build has them.
const BACKENDS: &[(&str, bool)] =
    &[("flex", true), ("ndarray", false), ("cuda", false), ("wgpu", false), ("remote", false)];

/// The device that a name stands for.
///
/// # Errors
/// If the name is unknown, or this build lacks the backend.
pub fn parse_device(name: &str) -> Result<Device, LabError> {
    let backend = name.split(':').next().unwrap_or(name);
    let available = BACKENDS.iter().filter(|(_, built)| *built).map(|(n, _)| *n).collect::<Vec<_>>().join(", ");
    match BACKENDS.iter().find(|(known, _)| *known == backend) {
        Some((_, true)) if name == "flex" => Ok(Device::flex()),
        Some((_, true)) => {
            Err(LabError::Usage(format!("device '{name}': '{backend}' takes no number; this build has {available}")))
        }
        Some((_, false)) => {
            Err(LabError::Usage(format!("device '{name}': this build has no {backend} backend; it has {available}")))
        }
        None => Err(LabError::Usage(format!("device '{name}' is not known; this build has {available}"))),
    }
}
