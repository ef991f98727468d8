//! From a `tokenizer.json` to the GGUF metadata that it is read back from: the other way of `gguf`.
//!
//! What comes out is read again and tried on texts of all kinds: a tokenizer that GGUF has no words for is refused.

use serde_json::Value;

use super::gguf::{name_for, split_name};
use super::{GgufTokenizerFields, Tokenizer, TokenizerError};

/// Words, numbers, white space, punctuation, contractions, other scripts: where tokenizers differ.
const PROBES: [&str; 6] = [
    "Hello world, it's 2024-12-31!  Two  spaces\n\nand\ttabs   \n  end.",
    "def f(x):\n    return x ** 12345 + 0.5  # don't",
    "Größe, naïve café, Привет мир, 你好世界, こんにちは, नमस्ते, 🙂👍🏽",
    "URL https://example.org/a?b=c&d=100%25 <tag attr=\"v\">I'LL WE'VE</tag>",
    " leading and trailing ",
    "\u{a0}\u{2028}e\u{301}\u{fb01}",
];

impl Tokenizer {
    /// The metadata of a GGUF that holds this tokenizer, of a model of that name. As some tokens are read by the model's name, the
    /// file's may be another one.
    ///
    /// # Errors
    /// Its kind has no words in GGUF.
    pub fn to_gguf(&self, name: &str) -> Result<GgufTokenizerFields, TokenizerError> {
        let origin = self.shared.origin.clone();
        let fail = |reason: String| {
            TokenizerError::invalid(&origin, format!("cannot be written to a GGUF: {reason}"))
        };
        let text = self.shared.engine.to_string(false).map_err(|e| fail(e.to_string()))?;
        let document: Value = serde_json::from_str(&text).map_err(|e| fail(e.to_string()))?;
        let fields = self.fields(&document, name).map_err(fail)?;
        let again = Tokenizer::from_gguf(&fields, &origin)?;
        for probe in PROBES {
            if self.encode(probe)? != again.encode(probe)? {
                return Err(fail(format!("read back, it would split {probe:?} into other tokens")));
            }
        }
        Ok(fields)
    }

    fn fields(&self, document: &Value, name: &str) -> Result<GgufTokenizerFields, String> {
        let model = &document["model"];
        if model["type"].as_str() != Some("BPE") {
            return Err(format!("its model is {}, not BPE", model["type"]));
        }
        let sentence_piece = model["byte_fallback"].as_bool() == Some(true);
        let (tokens, token_types) = self.tokens(document);
        let unknown = model["unk_token"].as_str().and_then(|token| self.shared.engine.token_to_id(token));
        let specials = &self.shared.specials;
        let bos_added = specials.bos.is_some_and(|id| self.shared.around.before.contains(&id));
        let eos = specials.eos.first().copied();
        let eos_added = eos.is_some_and(|id| self.shared.around.after.contains(&id));
        let mut fields = GgufTokenizerFields {
            model_name: Some(name.to_owned()),
            tokens,
            token_types,
            bos: specials.bos,
            eos,
            eot: specials.eos.get(1).copied(),
            eom: specials.eos.get(2).copied(),
            unknown,
            padding: specials.pad,
            add_bos: Some(bos_added),
            add_eos: Some(eos_added),
            ..GgufTokenizerFields::default()
        };
        match specials.chat_templates.to_config() {
            Some(Value::String(template)) => fields.chat_template = Some(template),
            Some(Value::Array(all)) => {
                for one in all {
                    let (Some(name), Some(template)) = (one["name"].as_str(), one["template"].as_str())
                    else {
                        continue;
                    };
                    if name == "default" {
                        fields.chat_template = Some(template.to_owned());
                    } else {
                        fields.named_chat_templates.push((name.to_owned(), template.to_owned()));
                    }
                }
            }
            _ => {}
        }
        if sentence_piece {
            fields.model = "llama".to_owned();
            let added = document["added_tokens"].as_array().into_iter().flatten();
            let added = added.filter_map(|token| {
                Some((token["content"].as_str()?, token["rstrip"].as_bool() == Some(true)))
            });
            fields.model_name = Some(name_for(name, added));
            // Merges come in the order of ids, so that scores that fall with ids say the same.
            fields.scores = (0..fields.tokens.len()).map(|id| -(id as f32)).collect();
            fields.unknown = fields.unknown.or(Some(0));
            fields.add_space_prefix = Some(document.to_string().contains("\"Prepend\""));
        } else {
            fields.model = "gpt2".to_owned();
            let ignore_merges = model["ignore_merges"].as_bool() == Some(true);
            let pre = split_name(&document["pre_tokenizer"], ignore_merges);
            fields.pre = Some(pre.ok_or("its way to split texts has no name in GGUF")?.to_owned());
            fields.merges = merges(model)?;
        }
        Ok(fields)
    }

    /// All tokens by id, and their types; ids that nothing has are unused.
    fn tokens(&self, document: &Value) -> (Vec<String>, Vec<i64>) {
        let count = self.shared.vocab_size;
        let mut tokens: Vec<String> = (0..count).map(|id| format!("[PAD{id}]")).collect();
        let mut types = vec![5; count];
        for (token, id) in self.shared.engine.get_vocab(false) {
            let byte = token.len() == 6 && token.starts_with("<0x") && token.ends_with('>');
            if let (Some(slot), Some(kind)) = (tokens.get_mut(id as usize), types.get_mut(id as usize)) {
                *slot = token;
                *kind = if byte { 6 } else { 1 };
            }
        }
        for added in document["added_tokens"].as_array().into_iter().flatten() {
            let (Some(id), Some(content)) = (added["id"].as_u64(), added["content"].as_str()) else {
                continue;
            };
            if let (Some(slot), Some(kind)) = (tokens.get_mut(id as usize), types.get_mut(id as usize)) {
                content.clone_into(slot);
                *kind = if added["special"].as_bool() == Some(true) { 3 } else { 4 };
            }
        }
        if let Some(unknown) = document["model"]["unk_token"].as_str()
            && document["model"]["byte_fallback"].as_bool() == Some(true)
            && let Some(kind) =
                self.shared.engine.token_to_id(unknown).and_then(|id| types.get_mut(id as usize))
        {
            *kind = 2;
        }
        (tokens, types)
    }
}

/// Merges as GGUF has them, two tokens with a space between.
fn merges(model: &Value) -> Result<Vec<String>, String> {
    let one = |merge: &Value| match merge {
        Value::String(text) => Some(text.clone()),
        Value::Array(pair) => match pair.as_slice() {
            [Value::String(a), Value::String(b)] => Some(format!("{a} {b}")),
            _ => None,
        },
        _ => None,
    };
    let list = model["merges"].as_array().ok_or("its model has no merges")?;
    list.iter().map(one).collect::<Option<_>>().ok_or_else(|| "its merges are no pairs of tokens".to_owned())
}
