//! `hf:ORG/NAME[@REV][:FILE]`.

use std::fmt;
use std::path::{Component, Path};
use std::str::FromStr;

use crate::error::HubError;

/// A model of the hub: a repository, a revision of it, and a file where the repository has several models.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubName {
    /// `ORG/NAME`.
    pub repo: String,
    /// A branch, a tag or a commit; `main` by default.
    pub revision: String,
    /// One `.gguf` or `.onnx` file.
    pub file: Option<String>,
    /// Whether the revision was given, and so belongs to the name as it is printed.
    named: bool,
}

impl HubName {
    /// What every such name begins with.
    pub const PREFIX: &str = "hf:";

    /// The same repository and revision with a file.
    pub(crate) fn with_file(&self, file: &str) -> Self {
        Self { file: Some(file.into()), ..self.clone() }
    }
}

impl FromStr for HubName {
    type Err = HubError;

    /// Parts become paths of the cache, so that whatever could lead out of it is refused.
    fn from_str(text: &str) -> Result<Self, HubError> {
        let wrong = |reason: String| HubError::Name { name: text.into(), reason };
        let rest = text.strip_prefix(Self::PREFIX).ok_or_else(|| wrong("it does not begin with hf:".into()))?;
        let (rest, file) = match rest.split_once(':') {
            Some((rest, file)) => (rest, Some(file)),
            None => (rest, None),
        };
        let named = rest.contains('@');
        let (repo, revision) = rest.split_once('@').unwrap_or((rest, "main"));
        let (org, name) = repo.split_once('/').ok_or_else(|| wrong(format!("'{repo}' is not ORG/NAME")))?;
        for part in [org, name] {
            if !is_plain(part, "-_.") || part.starts_with(['.', '-']) || part.contains("..") || part.contains("--") {
                return Err(wrong(format!("'{part}' is not the name of an organization or a repository")));
            }
        }
        if !is_plain(revision, "-_./") || !is_inside(revision) {
            return Err(wrong(format!("'{revision}' is not a branch, a tag or a commit")));
        }
        if let Some(file) = file {
            if !is_inside(file) {
                return Err(wrong(format!("'{file}' is not a file within a repository")));
            }
            if ![".gguf", ".onnx"].iter().any(|ending| file.ends_with(ending)) {
                return Err(wrong(format!(
                    "'{file}' is not a .gguf or .onnx file; without a file, safetensors are taken"
                )));
            }
        }
        Ok(Self { repo: repo.into(), revision: revision.into(), file: file.map(Into::into), named })
    }
}

impl fmt::Display for HubName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", Self::PREFIX, self.repo)?;
        if self.named {
            write!(f, "@{}", self.revision)?;
        }
        self.file.as_ref().map_or(Ok(()), |file| write!(f, ":{file}"))
    }
}

fn is_plain(text: &str, others: &str) -> bool {
    !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || others.contains(c))
}

/// Whether a relative path in the words of the hub stays in its folder, on every system.
pub(crate) fn is_inside(path: &str) -> bool {
    let normal = |c: Component| matches!(c, Component::Normal(_));
    let odd = |c: char| c.is_control() || c == '\\' || c == ':';
    !path.is_empty()
        && !path.contains(odd)
        && path.split('/').all(|part| !part.is_empty() && part != ".")
        && Path::new(path).components().all(normal)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_printed_as_they_are_read() {
        for text in [
            "hf:HuggingFaceTB/SmolLM2-135M",
            "hf:org/name@main",
            "hf:org/name@v1.0",
            "hf:org/name@refs/pr/1",
            "hf:org/name:model.Q4_K_M.gguf",
            "hf:org/name@0123456789012345678901234567890123456789:q4/model (1).gguf",
        ] {
            assert_eq!(text.parse::<HubName>().unwrap().to_string(), text);
        }
        assert_eq!("hf:a/b".parse::<HubName>().unwrap().revision, "main");
    }

    #[test]
    fn names_that_could_leave_the_cache_are_refused() {
        for text in [
            "a/b",
            "hf:",
            "hf:name",
            "hf:/name",
            "hf:org/",
            "hf:org/name/more",
            "hf:../name",
            "hf:org/..",
            "hf:org/.hidden",
            "hf:org/a..b",
            "hf:a--b/c",
            "hf:org/na me",
            "hf:org/na\nme",
            "hf:org/name@",
            "hf:org/name@../x",
            "hf:org/name@/etc",
            "hf:org/name@a/../../b",
            "hf:org/name@a//b",
            "hf:org/name@a b",
            "hf:org/name:",
            "hf:org/name:/etc/passwd.gguf",
            "hf:org/name:../x.gguf",
            "hf:org/name:a/../../x.gguf",
            "hf:org/name:a\\..\\x.gguf",
            "hf:org/name:c:x.gguf",
            "hf:org/name:model.bin",
        ] {
            let error = text.parse::<HubName>().unwrap_err().to_string();
            assert!(error.contains("hf:ORG/NAME[@REV][:FILE]"), "{text}: {error}");
        }
    }
}
