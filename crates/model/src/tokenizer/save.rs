//! Saving a tokenizer as the files that `transformers`' `AutoTokenizer` loads.

use std::io::{self, Write};
use std::path::Path;

use serde_json::{Map, Value, json};

use super::{Tokenizer, TokenizerError};
use crate::SaveError;
use crate::safetensors::{new_file_builder, sync_folder};

impl Tokenizer {
    /// Writes `tokenizer.json`, `tokenizer_config.json` and `special_tokens_map.json` into an existing folder; each file
    /// is whole or absent.
    pub fn save(&self, folder: &Path) -> Result<(), TokenizerError> {
        // Not as a text of its own: a vocabulary takes megabytes.
        write(folder, "tokenizer.json", |out| Ok(serde_json::to_writer(out, &self.shared.engine)?))?;
        let special = self.special_tokens();
        let mut config = Map::new();
        config.insert("tokenizer_class".to_owned(), "PreTrainedTokenizerFast".into());
        config.insert("clean_up_tokenization_spaces".to_owned(), false.into());
        if let Some(length) = self.shared.specials.model_max_length {
            config.insert("model_max_length".to_owned(), length.into());
        }
        config.extend(special.clone());
        if let Some(templates) = self.shared.specials.chat_templates.to_config() {
            config.insert("chat_template".to_owned(), templates);
        }
        let pretty = |object| move |out: &mut dyn Write| writeln!(out, "{:#}", Value::Object(object));
        write(folder, "tokenizer_config.json", pretty(config))?;
        write(folder, "special_tokens_map.json", pretty(special))?;
        sync_folder(folder);
        Ok(())
    }

    fn special_tokens(&self) -> Map<String, Value> {
        let named = [
            ("bos_token", self.bos_token()),
            ("eos_token", self.eos_token()),
            ("pad_token", self.pad_token()),
        ];
        named
            .into_iter()
            .filter_map(|(key, id)| Some((key.to_owned(), json!(self.id_to_token(id?)?))))
            .collect()
    }
}

fn write(
    folder: &Path,
    name: &str,
    contents: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> Result<(), TokenizerError> {
    let path = folder.join(name);
    let attempt = || -> io::Result<()> {
        let mut aside = new_file_builder().prefix(".writing-").tempfile_in(folder)?;
        let mut out = io::BufWriter::new(aside.as_file_mut());
        contents(&mut out)?;
        out.flush()?;
        drop(out);
        aside.as_file().sync_all()?;
        aside.persist(&path).map_err(|e| e.error)?;
        Ok(())
    };
    Ok(attempt().map_err(|source| SaveError::io("write", &path, source))?)
}
