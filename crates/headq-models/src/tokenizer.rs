//! Text to token ids: from `tokenizer.json`, or rebuilt from GGUF metadata.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use tokenizers::decoders::byte_fallback::ByteFallback;
use tokenizers::decoders::fuse::Fuse;
use tokenizers::decoders::sequence::Sequence as Decoders;
use tokenizers::decoders::strip::Strip;
use tokenizers::models::bpe::{BPE, BpeBuilder, Vocab};
use tokenizers::normalizers::{NFC, NormalizerWrapper, Prepend, Replace, Sequence as Normalizers};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence as PreTokenizers;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, SplitDelimiterBehavior};

use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::source::{GgufFile, MetadataValue};

/// A tokenizer that fits the model it came with.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    file: String,
    bos: Option<u32>,
    eos: Vec<u32>,
}

impl Tokenizer {
    /// Loads `tokenizer.json` of a folder. The beginning-of-sequence token is the one `tokenizer_config.json` names, else the
    /// config's.
    ///
    /// # Errors
    /// If the file is missing or damaged, or has tokens beyond the model's vocabulary.
    pub fn from_folder(folder: &Path, config: &ModelConfig) -> Result<Self, ModelError> {
        let path = folder.join("tokenizer.json");
        let file = path.display().to_string();
        if !path.is_file() {
            let reason = "no such file; fetch it (`headq pull` for a model of the hub), or write it with transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...)";
            return Err(ModelError::tokenizer(file, reason));
        }
        let bytes = std::fs::read(&path).map_err(ModelError::io(&path))?;
        // The tokenizers crate indexes out of bounds on merges whose result is longer than every token.
        let parsed = catch_unwind(|| tokenizers::Tokenizer::from_bytes(&bytes));
        let mut inner = match parsed {
            Ok(Ok(inner)) => inner,
            Ok(Err(e)) => return Err(ModelError::tokenizer(file, format!("not a tokenizer ({e}); fetch it again"))),
            Err(_) => return Err(ModelError::tokenizer(file, "not a consistent tokenizer; fetch it again")),
        };
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|e| ModelError::tokenizer(&file, e))?;
        let named = std::fs::read(folder.join("tokenizer_config.json")).ok();
        let named = named.and_then(|bytes| serde_json::from_slice::<serde_json::Value>(&bytes).ok());
        let bos = named.and_then(|json| {
            let token = &json["bos_token"];
            token.as_str().or_else(|| token["content"].as_str()).and_then(|t| inner.token_to_id(t))
        });
        Self { inner, file, bos: bos.or(config.bos_token_id), eos: config.eos_token_ids.clone() }.checked(config)
    }

    /// Rebuilds the tokenizer that a GGUF file describes.
    pub(crate) fn from_gguf(header: &GgufFile, config: &ModelConfig) -> Result<Self, ModelError> {
        let vocab = Vocabulary::read(header)?;
        let model = header.text("tokenizer.ggml.model")?;
        let inner = match model {
            Some("gpt2") => byte_level(header, &vocab)?,
            Some("llama") => sentence_piece(header, &vocab)?,
            other => {
                let found = other.map_or("nothing".into(), |name| format!("{name:?}"));
                return Err(header.wrong("tokenizer.ggml.model", "\"gpt2\" or \"llama\"", found));
            }
        };
        Self { inner, file: header.file.clone(), bos: config.bos_token_id, eos: config.eos_token_ids.clone() }
            .checked(config)
    }

    fn checked(self, config: &ModelConfig) -> Result<Self, ModelError> {
        let largest = self.inner.get_vocab(true).into_values().max().unwrap_or(0);
        if largest as usize >= config.vocab_size {
            let reason = format!(
                "the tokenizer has ids up to {largest}, but the model's embedding has {} rows; tokenizer and model do not belong together",
                config.vocab_size
            );
            return Err(ModelError::tokenizer(self.file, reason));
        }
        Ok(self)
    }

    /// Token ids of a text, without special tokens around it.
    ///
    /// # Errors
    /// If the tokenizer has no token for a part of the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, ModelError> {
        let encoding = self.inner.encode_fast(text, false).map_err(|e| ModelError::tokenizer(&self.file, e))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of token ids, special tokens included.
    ///
    /// # Errors
    /// If the decoder fails.
    pub fn decode(&self, ids: &[u32]) -> Result<String, ModelError> {
        self.inner.decode(ids, false).map_err(|e| ModelError::tokenizer(&self.file, e))
    }

    /// The beginning-of-sequence token, if the model has one.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// Tokens that end a text.
    pub fn eos(&self) -> &[u32] {
        &self.eos
    }

    /// Number of tokens, added ones included.
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }
}

/// What `tokenizer.ggml.token_type` says of a token.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Made by merges, or a byte.
    Normal,
    Byte,
    /// Taken from the text as a whole, before anything else.
    Control,
    User,
    /// Never produced.
    Unused,
}

/// The tokens of a GGUF file, by id.
struct Vocabulary<'a> {
    tokens: Vec<&'a str>,
    kinds: Vec<Kind>,
    ids: HashMap<&'a str, u32>,
}

impl<'a> Vocabulary<'a> {
    fn read(header: &'a GgufFile) -> Result<Self, ModelError> {
        const TOKENS: &str = "tokenizer.ggml.tokens";
        const TYPES: &str = "tokenizer.ggml.token_type";
        let listed = header.list(TOKENS)?.ok_or_else(|| header.wrong(TOKENS, "a list of tokens", "nothing"))?;
        let tokens: Vec<&str> = strings(header, TOKENS, listed)?;
        let kinds = match header.list(TYPES)? {
            None => vec![Kind::Normal; tokens.len()],
            Some(types) if types.len() == tokens.len() => types.iter().map(kind).collect(),
            Some(types) => return Err(header.wrong(TYPES, &format!("{} entries", tokens.len()), types.len())),
        };
        let ids = tokens.iter().enumerate().map(|(id, token)| (*token, id as u32)).collect();
        Ok(Self { tokens, kinds, ids })
    }

    fn contains(&self, token: &str) -> bool {
        self.ids.contains_key(token)
    }

    /// A BPE model; merges with a part or a result outside the vocabulary are left out.
    fn bpe(&self, merges: Vec<(String, String)>) -> BpeBuilder {
        let known =
            |(a, b): &(String, String)| self.contains(a) && self.contains(b) && self.contains(&format!("{a}{b}"));
        let merges = merges.into_iter().filter(known).collect();
        let vocab: Vocab = self.ids.iter().map(|(token, id)| ((*token).to_owned(), *id)).collect();
        BPE::builder().vocab_and_merges(vocab, merges)
    }

    fn add_special(&self, tokenizer: &mut tokenizers::Tokenizer) -> tokenizers::Result<()> {
        let of =
            |wanted: Kind| self.tokens.iter().zip(&self.kinds).filter(move |(_, k)| **k == wanted).map(|(t, _)| *t);
        tokenizer.add_special_tokens(of(Kind::Control).map(|t| AddedToken::from(t, true)))?;
        tokenizer.add_tokens(of(Kind::User).map(|t| AddedToken::from(t, false).normalized(false)))?;
        Ok(())
    }
}

fn strings<'a>(header: &GgufFile, key: &str, items: &'a [MetadataValue]) -> Result<Vec<&'a str>, ModelError> {
    let text = |v: &'a MetadataValue| match v {
        MetadataValue::Text(s) => Ok(s.as_str()),
        other => Err(header.wrong(key, "strings", other.kind())),
    };
    items.iter().map(text).collect()
}

fn kind(value: &MetadataValue) -> Kind {
    match value {
        MetadataValue::Whole(3) => Kind::Control,
        MetadataValue::Whole(4) => Kind::User,
        MetadataValue::Whole(5) => Kind::Unused,
        MetadataValue::Whole(6) => Kind::Byte,
        _ => Kind::Normal,
    }
}

/// How a byte-level tokenizer splits text before merging.
struct Splitting {
    /// Values of `tokenizer.ggml.pre`.
    names: &'static [&'static str],
    /// Single digits first.
    digits: bool,
    /// The regex; `None` is GPT-2's, built into [`ByteLevel`].
    regex: Option<&'static str>,
    /// Pieces that are tokens are taken whole, whatever the merges say.
    ignore_merges: bool,
    /// Canonical composition first.
    nfc: bool,
}

const LLAMA3_REGEX: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2_REGEX: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The pre-tokenizers of the models' own `tokenizer.json`, under the names llama.cpp has for them.
const SPLITTINGS: &[Splitting] = &[
    Splitting { names: &["default", "gpt-2"], digits: false, regex: None, ignore_merges: false, nfc: false },
    Splitting {
        names: &["smollm", "starcoder", "refact", "command-r"],
        digits: true,
        regex: None,
        ignore_merges: false,
        nfc: false,
    },
    Splitting {
        names: &["llama-bpe", "llama3", "llama-v3"],
        digits: false,
        regex: Some(LLAMA3_REGEX),
        ignore_merges: true,
        nfc: false,
    },
    Splitting {
        names: &["qwen2", "deepseek-r1-qwen"],
        digits: false,
        regex: Some(QWEN2_REGEX),
        ignore_merges: false,
        nfc: true,
    },
];

/// A byte-level BPE tokenizer with merges.
fn byte_level(header: &GgufFile, vocab: &Vocabulary) -> Result<tokenizers::Tokenizer, ModelError> {
    const PRE: &str = "tokenizer.ggml.pre";
    const MERGES: &str = "tokenizer.ggml.merges";
    let pre = header.text(PRE)?.unwrap_or("default");
    let splitting = SPLITTINGS.iter().find(|s| s.names.contains(&pre)).ok_or_else(|| {
        let known: Vec<_> = SPLITTINGS.iter().flat_map(|s| s.names).copied().collect();
        header.wrong(PRE, &format!("a known pre-tokenizer ({})", known.join(", ")), format!("{pre:?}"))
    })?;
    let listed = header.list(MERGES)?.ok_or_else(|| header.wrong(MERGES, "a list of merges", "nothing"))?;
    let merges = strings(header, MERGES, listed)?
        .into_iter()
        .filter_map(|merge| {
            // The first character may itself be the separator.
            let first = merge.chars().next()?.len_utf8();
            let (a, b) = merge.split_at(first + merge[first..].find(' ')?);
            Some((a.to_owned(), b[1..].to_owned()))
        })
        .collect();
    let build = || -> tokenizers::Result<tokenizers::Tokenizer> {
        let model = vocab.bpe(merges).ignore_merges(splitting.ignore_merges).build()?;
        let mut tokenizer = tokenizers::Tokenizer::new(model);
        let mut steps = Vec::new();
        if splitting.digits {
            steps.push(Digits::new(true).into());
        }
        if let Some(regex) = splitting.regex {
            let pattern = SplitPattern::Regex(regex.into());
            steps.push(Split::new(pattern, SplitDelimiterBehavior::Isolated, false)?.into());
        }
        steps.push(ByteLevel::new(false, true, splitting.regex.is_none()).into());
        tokenizer.with_pre_tokenizer(Some(PreTokenizers::new(steps)));
        tokenizer.with_decoder(Some(ByteLevel::default()));
        if splitting.nfc {
            tokenizer.with_normalizer(Some(NFC))?;
        }
        vocab.add_special(&mut tokenizer)?;
        Ok(tokenizer)
    };
    guarded(header, build)
}

/// SentencePiece BPE with byte fallback: scores become merges as in transformers' converter.
fn sentence_piece(header: &GgufFile, vocab: &Vocabulary) -> Result<tokenizers::Tokenizer, ModelError> {
    const SCORES: &str = "tokenizer.ggml.scores";
    let scores = header.list(SCORES)?.ok_or_else(|| header.wrong(SCORES, "a list of scores", "nothing"))?;
    if scores.len() != vocab.tokens.len() {
        return Err(header.wrong(SCORES, &format!("{} entries", vocab.tokens.len()), scores.len()));
    }
    let scores: Vec<f64> = scores
        .iter()
        .map(|s| match s {
            MetadataValue::Real(x) => Ok(*x),
            other => Err(header.wrong(SCORES, "real numbers", other.kind())),
        })
        .collect::<Result<_, _>>()?;
    let prefix = header.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
    let unknown = header.size("tokenizer.ggml.unknown_token_id")?.and_then(|id| vocab.tokens.get(id)).copied();
    let build = || -> tokenizers::Result<tokenizers::Tokenizer> {
        let mut model = vocab.bpe(merges_by_score(vocab, &scores)).byte_fallback(true).fuse_unk(true);
        if let Some(unknown) = unknown.or(vocab.contains("<unk>").then_some("<unk>")) {
            model = model.unk_token(unknown.to_owned());
        }
        let mut tokenizer = tokenizers::Tokenizer::new(model.build()?);
        let mut normalizers: Vec<NormalizerWrapper> = Vec::new();
        let mut decoders = vec![Replace::new("▁", " ")?.into(), ByteFallback::new().into(), Fuse::new().into()];
        if prefix {
            normalizers.push(Prepend::new("▁".into()).into());
            decoders.push(Strip::new(' ', 1, 0).into());
        }
        normalizers.push(Replace::new(" ", "▁")?.into());
        tokenizer.with_normalizer(Some(Normalizers::new(normalizers)))?;
        tokenizer.with_decoder(Some(Decoders::new(decoders)));
        vocab.add_special(&mut tokenizer)?;
        Ok(tokenizer)
    };
    guarded(header, build)
}

/// Every split of a normal token into two tokens, best score first.
///
/// Ties are broken as `generate_merges` of transformers' `convert_slow_tokenizer.py` does: longer parts first, then the
/// order of the vocabulary.
fn merges_by_score(vocab: &Vocabulary, scores: &[f64]) -> Vec<(String, String)> {
    let mut merges = Vec::new();
    for ((token, kind), score) in vocab.tokens.iter().zip(&vocab.kinds).zip(scores) {
        if *kind != Kind::Normal {
            continue;
        }
        let splits = token.char_indices().skip(1).map(|(at, _)| token.split_at(at));
        let mut splits: Vec<_> =
            splits.filter_map(|(a, b)| Some((*vocab.ids.get(a)?, *vocab.ids.get(b)?, a, b))).collect();
        splits.sort_unstable_by_key(|(a, b, ..)| (*a, *b));
        merges.extend(splits.into_iter().map(|(_, _, a, b)| (*score, a.chars().count(), b.chars().count(), a, b)));
    }
    merges.sort_by(|x, y| y.0.total_cmp(&x.0).then((y.1, y.2).cmp(&(x.1, x.2))));
    merges.into_iter().map(|(.., a, b)| (a.to_owned(), b.to_owned())).collect()
}

/// Errors of the tokenizers crate, and its panics on vocabularies it does not expect, as ours.
fn guarded(
    header: &GgufFile,
    build: impl FnOnce() -> tokenizers::Result<tokenizers::Tokenizer>,
) -> Result<tokenizers::Tokenizer, ModelError> {
    match catch_unwind(AssertUnwindSafe(build)) {
        Ok(Ok(tokenizer)) => Ok(tokenizer),
        Ok(Err(e)) => {
            Err(ModelError::tokenizer(&header.file, format!("the tokenizer in the metadata is unusable ({e})")))
        }
        Err(_) => Err(ModelError::tokenizer(&header.file, "the tokenizer in the metadata is not consistent")),
    }
}
