//! The environment variables that every tool of the hub reads.

use std::env;
use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use crate::error::HubError;

/// A server that says nothing for so long has stopped, where the environment does not say otherwise.
pub const SILENCE: Duration = Duration::from_secs(30);

/// Where the hub and its cache are, and who asks.
#[derive(Clone, PartialEq, Eq)]
pub struct Settings {
    /// Address of the hub, without a slash at its end.
    pub endpoint: String,
    /// Access token, for private and gated repositories.
    pub token: Option<String>,
    /// Folder of the cache.
    pub cache: PathBuf,
    /// Whether only the cache is used.
    pub offline: bool,
    /// How long a server may say nothing before an attempt is given up; [`SILENCE`] by default.
    pub timeout: Duration,
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { endpoint, token, cache, offline, timeout } = self;
        let token = token.as_ref().map(|_| "…");
        write!(f, "Settings {{ endpoint: {endpoint:?}, token: {token:?}, cache: {cache:?}, ")?;
        write!(f, "offline: {offline}, timeout: {timeout:?} }}")
    }
}

impl Settings {
    /// Reads the environment as `huggingface_hub` does.
    ///
    /// - the hub: `HF_ENDPOINT`, else <https://huggingface.co>;
    /// - the cache: `HF_HUB_CACHE`, else `HF_HOME/hub`, else `XDG_CACHE_HOME/huggingface/hub`, else `~/.cache/huggingface/hub`;
    /// - the token: `HF_TOKEN`, else the file `HF_TOKEN_PATH`, else the file `token` beside `hub` (`hf auth login` writes it);
    /// - `HF_HUB_OFFLINE`: `1`, `ON`, `YES` or `TRUE` for no network. Proxies are those of `HTTPS_PROXY` and the like;
    /// - `HF_HUB_DOWNLOAD_TIMEOUT`: seconds of silence after which an attempt is given up.
    ///
    /// # Errors
    /// If an address or a number is none, a token cannot be sent, or there is no home folder.
    pub fn from_env() -> Result<Self, HubError> {
        Self::read(&|name| env::var_os(name), env::home_dir())
    }

    fn read(lookup: &dyn Fn(&str) -> Option<OsString>, user: Option<PathBuf>) -> Result<Self, HubError> {
        let path = |name: &str| lookup(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let text = |name: &str| path(name).map(|value| value.to_string_lossy().trim().to_string());
        let home = path("HF_HOME")
            .or_else(|| path("XDG_CACHE_HOME").map(|folder| folder.join("huggingface")))
            .or_else(|| user.map(|user| user.join(".cache/huggingface")));
        let cache = path("HF_HUB_CACHE").or_else(|| home.as_ref().map(|home| home.join("hub")));
        let cache = cache.ok_or_else(|| HubError::Setting {
            variable: "HF_HOME".into(),
            reason: "expected a folder for the cache, found nothing, nor a home folder to put it in; set it".into(),
        })?;
        let token = match text("HF_TOKEN") {
            Some(token) => Some(("HF_TOKEN".to_string(), token)),
            None => {
                let file = path("HF_TOKEN_PATH").or_else(|| home.map(|home| home.join("token")));
                file.and_then(|file| Some((file.display().to_string(), std::fs::read_to_string(file).ok()?)))
            }
        };
        let token = token.map(|(source, token)| checked_token(source, token.trim())).transpose()?.flatten();
        let offline =
            text("HF_HUB_OFFLINE").is_some_and(|v| ["1", "on", "yes", "true"].contains(&v.to_lowercase().as_str()));
        let given = text("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".into());
        let endpoint = given.trim_end_matches('/').to_string();
        if !["https://", "http://"]
            .iter()
            .any(|scheme| endpoint.strip_prefix(scheme).is_some_and(|host| !host.is_empty()))
        {
            return Err(HubError::Setting {
                variable: "HF_ENDPOINT".into(),
                reason: format!("expected an address like https://huggingface.co, found '{given}'"),
            });
        }
        let timeout = text("HF_HUB_DOWNLOAD_TIMEOUT").map_or(Ok(SILENCE), |text| seconds(&text))?;
        Ok(Self { endpoint, token, cache, offline, timeout })
    }
}

/// A time that a server may take, a day at most.
fn seconds(text: &str) -> Result<Duration, HubError> {
    let seconds = text.parse().ok().filter(|s: &f64| *s > 0.0 && *s <= 86_400.0);
    seconds.map(Duration::from_secs_f64).ok_or_else(|| HubError::Setting {
        variable: "HF_HUB_DOWNLOAD_TIMEOUT".into(),
        reason: format!("expected seconds, more than 0 and at most 86400, found '{text}'"),
    })
}

/// The token if it can be sent in a header; an empty one is none. Messages do not repeat it.
fn checked_token(variable: String, token: &str) -> Result<Option<String>, HubError> {
    if !token.chars().all(|c| c.is_ascii_graphic()) {
        let reason = "expected an access token (hf_…), found spaces or characters outside ASCII".into();
        return Err(HubError::Setting { variable, reason });
    }
    Ok(Some(token.to_string()).filter(|token| !token.is_empty()))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Settings, HubError> {
        let lookup = |name: &str| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| value.into());
        Settings::read(&lookup, Some("/home/u".into()))
    }

    #[test]
    fn the_cache_is_where_other_tools_have_it() {
        for (variables, cache) in [
            (&[][..], "/home/u/.cache/huggingface/hub"),
            (&[("XDG_CACHE_HOME", "/x")], "/x/huggingface/hub"),
            (&[("XDG_CACHE_HOME", "/x"), ("HF_HOME", "/h")], "/h/hub"),
            (&[("HF_HOME", "/h"), ("HF_HUB_CACHE", "/c")], "/c"),
            (&[("HF_HOME", "")], "/home/u/.cache/huggingface/hub"),
        ] {
            assert_eq!(read(variables).unwrap().cache, Path::new(cache), "{variables:?}");
        }
        assert!(Settings::read(&|_| None, None).unwrap_err().to_string().contains("HF_HOME"));
    }

    #[test]
    fn tokens_come_from_the_variable_or_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let home = folder.path().to_str().unwrap();
        let elsewhere = folder.path().join("elsewhere");
        assert_eq!(read(&[("HF_HOME", home)]).unwrap().token, None);
        std::fs::write(folder.path().join("token"), "hf_login\n").unwrap();
        std::fs::write(&elsewhere, "hf_elsewhere").unwrap();
        let named = ("HF_TOKEN_PATH", elsewhere.to_str().unwrap());
        assert_eq!(read(&[("HF_HOME", home)]).unwrap().token.unwrap(), "hf_login");
        assert_eq!(read(&[("HF_HOME", home), named]).unwrap().token.unwrap(), "hf_elsewhere");
        let settings = read(&[("HF_HOME", home), named, ("HF_TOKEN", " hf_variable\n")]).unwrap();
        assert_eq!(settings.token.as_deref(), Some("hf_variable"));
        assert!(!format!("{settings:?}").contains("hf_variable"), "a token is never printed");
        let error = read(&[("HF_TOKEN", "hf_a\nb")]).unwrap_err().to_string();
        assert!(error.starts_with("HF_TOKEN") && !error.contains("hf_a"), "{error}");
    }

    #[test]
    fn offline_and_endpoint() {
        for (value, offline) in [("1", true), ("TRUE", true), ("Yes", true), ("on", true), ("0", false), ("no", false)]
        {
            assert_eq!(read(&[("HF_HUB_OFFLINE", value)]).unwrap().offline, offline, "{value}");
        }
        assert_eq!(read(&[]).unwrap().endpoint, "https://huggingface.co");
        assert_eq!(read(&[("HF_ENDPOINT", "http://mirror:80/hub/")]).unwrap().endpoint, "http://mirror:80/hub");
        for value in ["mirror", "ftp://mirror", "https://", "http://", "http:///"] {
            let error = read(&[("HF_ENDPOINT", value)]).unwrap_err().to_string();
            assert!(error.contains("HF_ENDPOINT") && error.ends_with(&format!("found '{value}'")), "{error}");
        }
    }

    #[test]
    fn how_long_a_server_may_say_nothing() {
        let timeout = |value: &str| read(&[("HF_HUB_DOWNLOAD_TIMEOUT", value)]).map(|settings| settings.timeout);
        assert_eq!(read(&[]).unwrap().timeout, SILENCE);
        assert_eq!(timeout("").unwrap(), SILENCE);
        assert_eq!(timeout("7").unwrap(), Duration::from_secs(7));
        assert_eq!(timeout(" 0.25 ").unwrap(), Duration::from_millis(250));
        for value in ["0", "-1", "1m", "NaN", "inf", "1e9", "86401"] {
            let error = timeout(value).unwrap_err().to_string();
            assert!(
                error.starts_with("HF_HUB_DOWNLOAD_TIMEOUT: ") && error.ends_with(&format!("'{value}'")),
                "{error}"
            );
        }
    }
}
