//! Devices by name, chosen at run time: `flex`, `ndarray`, `cuda:1`, `wgpu`, `remote:ws://gpu:3000`.
//!
//! A [`DeviceName`] is text until it is opened. [`DeviceName::open`] looks before it touches a backend, because a backend whose driver
//! or adapter is missing panics at the first tensor.

use std::fmt;
use std::str::FromStr;

use burn::tensor::{DType, Device, FloatDType, Tensor};
use serde::{Deserialize, Serialize};

use crate::Error;

/// Environment variable with the token that a remote server asks for.
pub const TOKEN_VARIABLE: &str = "HEADQ_REMOTE_TOKEN";

/// A backend that Burn may be built with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Backend {
    /// The CPU; always there.
    Flex,
    /// The CPU through ndarray. Deprecated by Burn; a second, independent opinion.
    NdArray,
    /// NVIDIA GPUs.
    Cuda,
    /// GPUs, and software devices, through Vulkan, Metal or DirectX.
    Wgpu,
    /// A device of another machine, through `headq serve`.
    Remote,
}

impl Backend {
    /// All that this program knows.
    pub const ALL: [Self; 5] = [Self::Flex, Self::NdArray, Self::Cuda, Self::Wgpu, Self::Remote];

    /// The name on the command line, which is also that of the cargo feature.
    pub fn name(self) -> &'static str {
        match self {
            Self::Flex => "flex",
            Self::NdArray => "ndarray",
            Self::Cuda => "cuda",
            Self::Wgpu => "wgpu",
            Self::Remote => "remote",
        }
    }

    /// Whether this build has it.
    pub fn is_built(self) -> bool {
        match self {
            Self::Flex => true,
            Self::NdArray => cfg!(feature = "ndarray"),
            Self::Cuda => cfg!(feature = "cuda"),
            Self::Wgpu => cfg!(feature = "wgpu"),
            Self::Remote => cfg!(feature = "remote"),
        }
    }

    /// Those that this build has.
    pub fn built() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|b| b.is_built())
    }

    /// Whether its first use runs code of a driver, which may take the process down where it is broken.
    pub fn has_driver(self) -> bool {
        matches!(self, Self::Cuda | Self::Wgpu)
    }

    /// Whether its tensors are in this process's memory and computed by its threads.
    pub fn is_cpu(self) -> bool {
        matches!(self, Self::Flex | Self::NdArray)
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The written form of a device. Parse and print round-trip.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum DeviceName {
    /// `flex`
    Flex,
    /// `ndarray`
    NdArray,
    /// `cuda`, `cuda:N`: the N-th that the driver lists.
    Cuda(usize),
    /// `wgpu`, `wgpu:N`: the N-th adapter; without a number, the one that wgpu likes best.
    Wgpu(Option<usize>),
    /// `remote:URL`, `remote:URL#N`: the N-th device that a server hosts; URL is `ws://host:port`.
    Remote {
        /// Where the server listens.
        url: String,
        /// Which of its devices.
        index: usize,
    },
}

impl DeviceName {
    /// The backend that it belongs to.
    pub fn backend(&self) -> Backend {
        match self {
            Self::Flex => Backend::Flex,
            Self::NdArray => Backend::NdArray,
            Self::Cuda(_) => Backend::Cuda,
            Self::Wgpu(_) => Backend::Wgpu,
            Self::Remote { .. } => Backend::Remote,
        }
    }

    /// The device, ready to use.
    ///
    /// # Errors
    /// If this build lacks the backend, or the machine the device: in one line, what is missing and what to do. A driver that is
    /// installed but broken may still panic or end the process; see [`Backend::has_driver`].
    pub fn open(&self) -> Result<Device, Error> {
        let backend = self.backend();
        if !backend.is_built() {
            return Err(self.error(format!(
                "this build has no {backend} backend (it has {}); build with `cargo build --release --features {backend}`",
                list(Backend::built())
            )));
        }
        match self {
            Self::Flex => Ok(Device::flex()),
            #[cfg(feature = "ndarray")]
            #[allow(deprecated, reason = "wanted as a second implementation to compare with")]
            Self::NdArray => Ok(Device::ndarray()),
            #[cfg(feature = "cuda")]
            Self::Cuda(index) => self.listed(burn::tensor::DeviceType::Cuda, *index, NO_CUDA),
            #[cfg(feature = "wgpu")]
            Self::Wgpu(None) => {
                self.listed(burn::tensor::DeviceType::Wgpu, 0, NO_WGPU)?;
                Ok(Device::wgpu(Default::default()))
            }
            #[cfg(feature = "wgpu")]
            Self::Wgpu(Some(index)) => self.listed(burn::tensor::DeviceType::Wgpu, *index, NO_WGPU),
            #[cfg(feature = "remote")]
            Self::Remote { url, index } => {
                let mut host = burn::remote::RemoteHost::websocket(url);
                if let Ok(token) = std::env::var(TOKEN_VARIABLE) {
                    host = host.with_credential(token);
                }
                Device::remote_options(&host).device_index(*index).init().map_err(|e| self.error(refusal(&e)))
            }
            #[allow(unreachable_patterns, reason = "reachable in builds without some backend")]
            _ => unreachable!("{backend} is built, so that its arm is there"),
        }
    }

    /// The first device of each local backend of this build, where there is one.
    pub fn present() -> Vec<(Self, Device)> {
        [Self::Flex, Self::NdArray, Self::Cuda(0), Self::Wgpu(None)]
            .into_iter()
            .filter_map(|name| name.open().ok().map(|device| (name, device)))
            .collect()
    }

    #[cfg(any(feature = "cuda", feature = "wgpu"))]
    fn listed(&self, kind: burn::tensor::DeviceType, index: usize, missing: &str) -> Result<Device, Error> {
        let present: Vec<Device> = Device::enumerate(kind).into_iter().collect();
        let count = present.len();
        present.into_iter().nth(index).ok_or_else(|| {
            self.error(match count {
                0 => missing.to_owned(),
                1 => "there is one device, number 0; `headq devices` shows it".to_owned(),
                n => format!("there are {n} devices, 0 to {}; `headq devices` lists them", n - 1),
            })
        })
    }

    /// How reports call an open device: its name, what it is where it tells, and the type of the weights where it is not f32.
    pub fn label(&self, device: &Device, precision: Precision) -> String {
        let what = identity(device).map_or_else(String::new, |what| format!(" ({what})"));
        match precision {
            Precision::F32 => format!("{self}{what}"),
            half => format!("{self}{what}, {half} weights"),
        }
    }

    fn error(&self, reason: String) -> Error {
        Error::Device { device: self.to_string(), reason }
    }
}

/// Type of a model's matrices, and of the products with them.
///
/// Everything else (normalisation, attention, softmax, losses, statistics) is f32 or wider whatever this is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// IEEE single precision.
    #[default]
    F32,
    /// IEEE half precision: 11 significant bits, up to 65,504.
    F16,
    /// bfloat16: 8 significant bits, the range of f32.
    Bf16,
}

impl Precision {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::F32, Self::F16, Self::Bf16];

    /// As Burn calls it.
    pub fn dtype(self) -> FloatDType {
        match self {
            Self::F32 => FloatDType::F32,
            Self::F16 => FloatDType::F16,
            Self::Bf16 => FloatDType::BF16,
        }
    }

    /// Bytes of one element.
    pub fn bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// Whether a device computes with it.
    pub fn is_on(self, device: &Device) -> bool {
        device.supports_dtype(DType::from(self.dtype()))
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        })
    }
}

impl FromStr for Precision {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = || Self::ALL.map(|p| p.to_string()).join(", ");
        Self::ALL.into_iter().find(|p| p.to_string() == text).ok_or_else(|| format!("not known; {}", known()))
    }
}

/// What a device calls itself, e.g. `NVIDIA H200`; `None` where it does not tell.
pub fn identity(device: &Device) -> Option<String> {
    #[cfg(any(feature = "cuda", feature = "wgpu"))]
    return device.identity().map(|identity| identity.name);
    #[cfg(not(any(feature = "cuda", feature = "wgpu")))]
    {
        let _ = device;
        None
    }
}

/// Whether a device computes with this process's threads.
pub fn is_cpu(device: &Device) -> bool {
    let plain = device.clone().inner();
    #[cfg(feature = "ndarray")]
    #[allow(deprecated, reason = "wanted as a second implementation to compare with")]
    if plain == Device::ndarray() {
        return true;
    }
    plain == Device::flex()
}

/// Does a product on a device and reads it back: the first use, at which a broken one fails.
///
/// # Errors
/// If the result is wrong.
pub fn exercise(device: &Device) -> Result<(), String> {
    let ones = Tensor::<2>::ones([8, 8], device);
    let sum = (ones.clone().matmul(ones)).sum().into_data().convert::<f64>();
    match sum.as_slice::<f64>() {
        Ok([512.0]) => Ok(()),
        other => Err(format!("a product of 8×8 matrices of ones adds up to {other:?}, not to 512")),
    }
}

/// What a missing CUDA driver means.
#[cfg(feature = "cuda")]
const NO_CUDA: &str = "no NVIDIA GPU, or no driver (libcuda.so); install the NVIDIA driver, or use another device (`headq devices` lists them)";

/// What a missing graphics adapter means.
#[cfg(feature = "wgpu")]
const NO_WGPU: &str = "no graphics adapter; install a Vulkan driver (on Debian, libvulkan1 with mesa-vulkan-drivers has a software one), or use another device";

/// Why a remote device cannot be used, with what to do.
#[cfg(feature = "remote")]
fn refusal(error: &burn::remote::ConnectError) -> String {
    use burn::remote::ConnectError;
    match error {
        ConnectError::Unreachable { reason } => {
            format!(
                "no server answers there ({reason}); start one with `headq serve`, and check host, port and firewall"
            )
        }
        ConnectError::Unauthorized => format!("the server refused the token; set {TOKEN_VARIABLE} to the server's"),
        ConnectError::NoSuchDevice { device_count } => {
            format!("the server hosts {device_count} device(s); their numbers begin at 0, after a '#'")
        }
        ConnectError::IncompatibleProtocol { client_version, server_version } => format!(
            "the server speaks version {server_version} of Burn's remote protocol and this program {client_version}; \
             use the same release on both sides"
        ),
        other => other.to_string(),
    }
}

fn list(backends: impl Iterator<Item = Backend>) -> String {
    backends.map(Backend::name).collect::<Vec<_>>().join(", ")
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flex | Self::NdArray | Self::Wgpu(None) | Self::Cuda(0) => write!(f, "{}", self.backend()),
            Self::Cuda(index) | Self::Wgpu(Some(index)) => write!(f, "{}:{index}", self.backend()),
            Self::Remote { url, index: 0 } => write!(f, "remote:{url}"),
            Self::Remote { url, index } => write!(f, "remote:{url}#{index}"),
        }
    }
}

impl FromStr for DeviceName {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let error = |reason: String| Error::DeviceName { device: text.to_owned(), reason };
        let (name, rest) = match text.split_once(':') {
            Some((name, rest)) => (name, Some(rest)),
            None => (text, None),
        };
        let backend = Backend::ALL.into_iter().find(|b| b.name() == name).ok_or_else(|| {
            error(format!("not known; devices are {}", "flex, ndarray, cuda[:N], wgpu[:N], remote:URL"))
        })?;
        let number = || match rest {
            None => Ok(None),
            Some(digits) => digits
                .parse::<usize>()
                .map(Some)
                .map_err(|_| error(format!("'{digits}' is not a device number; write {backend}:0"))),
        };
        match backend {
            Backend::Flex | Backend::NdArray if rest.is_some() => {
                Err(error(format!("'{backend}' takes no number; --threads sets the cores it uses")))
            }
            Backend::Flex => Ok(Self::Flex),
            Backend::NdArray => Ok(Self::NdArray),
            Backend::Cuda => Ok(Self::Cuda(number()?.unwrap_or(0))),
            Backend::Wgpu => Ok(Self::Wgpu(number()?)),
            Backend::Remote => remote(rest.unwrap_or_default()).map_err(error),
        }
    }
}

/// `ws://host:port`, `ws://host:port#N` or `host:port`.
fn remote(text: &str) -> Result<DeviceName, String> {
    let example = "write remote:ws://HOST:PORT, with #N for the N-th device of the server";
    let (address, index) = match text.split_once('#') {
        None => (text, 0),
        Some((address, index)) => {
            (address, index.parse().map_err(|_| format!("'{index}' is not a device number; {example}"))?)
        }
    };
    let host = match address.split_once("://") {
        None => address,
        Some(("ws", host)) => host,
        Some((scheme, _)) => return Err(format!("'{scheme}' is not a protocol of headq serve; {example}")),
    };
    let host = host.trim_end_matches('/');
    let complete = host.rsplit_once(':').is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok());
    match complete {
        true => Ok(DeviceName::Remote { url: format!("ws://{host}"), index }),
        false => Err(format!("'{address}' is not an address; {example}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for name in
            ["flex", "ndarray", "cuda", "cuda:3", "wgpu", "wgpu:0", "remote:ws://gpu:3000", "remote:ws://[::1]:80#2"]
        {
            assert_eq!(name.parse::<DeviceName>().unwrap().to_string(), name);
        }
        assert_eq!("cuda:0".parse::<DeviceName>().unwrap(), DeviceName::Cuda(0));
        assert_eq!("remote:gpu:1/".parse::<DeviceName>().unwrap().to_string(), "remote:ws://gpu:1");
    }

    #[test]
    fn wrong_names_say_what_is_known() {
        for (name, part) in [
            ("gpu", "flex, ndarray, cuda[:N], wgpu[:N], remote:URL"),
            ("", "flex, ndarray"),
            ("flex:0", "takes no number"),
            ("cuda:x", "not a device number"),
            ("cuda:-1", "not a device number"),
            ("wgpu:", "not a device number"),
            ("remote", "not an address"),
            ("remote:http://gpu:3000", "not a protocol"),
            ("remote:gpu", "not an address"),
            ("remote:ws://gpu:99999", "not an address"),
            ("remote:ws://gpu:1#a", "not a device number"),
        ] {
            let error = name.parse::<DeviceName>().unwrap_err().to_string();
            assert!(error.contains(part), "{name}: {error}");
        }
    }

    #[test]
    fn backends_that_are_not_built_name_their_feature() {
        for backend in Backend::ALL.into_iter().filter(|b| !b.is_built()) {
            let name = if backend == Backend::Remote { "remote:ws://gpu:1".into() } else { backend.to_string() };
            let error = name.parse::<DeviceName>().unwrap().open().unwrap_err().to_string();
            assert!(error.contains(&format!("--features {backend}")), "{error}");
        }
    }
}
