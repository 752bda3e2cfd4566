//! A tokenizer with one token per word, punctuation mark and line break.

use tokenizers::decoders::fuse::Fuse;
use tokenizers::decoders::sequence::Sequence;
use tokenizers::decoders::wordpiece::WordPiece;
use tokenizers::models::wordlevel::WordLevel;
use tokenizers::normalizers::Replace;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{SplitDelimiterBehavior, Tokenizer};

use crate::valley;

/// The token of every word that is not in the vocabulary.
pub const UNKNOWN: &str = "<unk>";

/// All tokens; a token's place is its id.
pub fn tokens() -> Vec<&'static str> {
    std::iter::once(UNKNOWN).chain(valley::vocabulary()).collect()
}

/// The tokenizer of [`tokens`], which gives a page back as [`valley::render`] wrote it.
///
/// # Errors
/// If the tokenizers library refuses a part of it.
pub fn tokenizer() -> tokenizers::Result<Tokenizer> {
    let ids = tokens().into_iter().zip(0..).map(|(word, id)| (word.to_owned(), id)).collect();
    let model = WordLevel::builder().vocab(ids).unk_token(UNKNOWN.into()).build()?;
    // Spaces are what lies between matches; they are dropped, and decoding puts them back.
    let pattern = SplitPattern::Regex(r"\n+|\w+|[^\w\s]".into());
    let split = Split::new(pattern, SplitDelimiterBehavior::Removed, true)?;
    let mut decoders = vec![WordPiece::new("##".into(), true).into(), Fuse::new().into()];
    for (from, to) in [(" \n", "\n"), ("\n ", "\n"), (" :", ":")] {
        decoders.push(Replace::new(from, to)?.into());
    }
    let mut tokenizer = Tokenizer::new(model);
    tokenizer.with_pre_tokenizer(Some(split));
    tokenizer.with_decoder(Some(Sequence::new(decoders)));
    Ok(tokenizer)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use burn::tensor::Device;
    use headq::DenseAttention;
    use headq_models::{LoadOptions, load};
    use rand::SeedableRng;
    use rand_chacha::ChaCha8Rng;

    use super::*;
    use crate::valley::{PAGE, page, render};

    #[test]
    fn pages_round_trip() {
        let tokenizer = tokenizer().unwrap();
        let vocabulary = tokens();
        let mut rng = ChaCha8Rng::seed_from_u64(5);
        for _ in 0..20 {
            let words: Vec<&str> = page(&mut rng).into_iter().chain(page(&mut rng)).collect();
            let text = render(&words);
            let ids = tokenizer.encode(text.as_str(), false).unwrap().get_ids().to_vec();
            assert!(ids.iter().map(|&id| vocabulary[id as usize]).eq(words));
            assert_eq!(tokenizer.decode(&ids, false).unwrap(), text);
        }
    }

    #[test]
    fn unknown_words_become_one_token_each() {
        let ids = tokenizer().unwrap().encode("Anna owns a spaceship.", false).unwrap().get_ids().to_vec();
        let vocabulary = tokens();
        let words: Vec<&str> = ids.iter().map(|&id| vocabulary[id as usize]).collect();
        assert_eq!(words, ["Anna", UNKNOWN, "a", UNKNOWN, "."]);
    }

    #[test]
    fn the_shipped_model_reads_its_test_text() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../checkpoints/headq-embedded");
        let loaded = load(&folder, &Device::flex(), &LoadOptions::default()).unwrap();
        let tokenizer = loaded.tokenizer().unwrap();
        assert_eq!(tokenizer.vocab_size(), tokens().len());
        for name in ["test.txt", "calibration.txt"] {
            let text = std::fs::read_to_string(folder.join(name)).unwrap();
            let ids = tokenizer.encode(&text).unwrap();
            assert!(ids.len().is_multiple_of(PAGE) && !ids.contains(&0));
            assert_eq!(tokenizer.decode(&ids).unwrap(), text);
            let hidden =
                loaded.model.hidden(loaded.model.ids(&ids[..PAGE - 1], 1, 0).unwrap(), 0, &mut DenseAttention::new());
            let nll = loaded.model.token_nll(hidden, &ids[1..PAGE]).unwrap();
            let mean = nll.iter().sum::<f64>() / nll.len() as f64;
            // The unigram model takes 4.7 nats per token.
            assert!(mean < 2.5, "{name}: {mean:.3} nats per token, far more than the README says");
        }
    }
}
