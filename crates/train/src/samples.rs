//! From a configuration to the encoder of its samples.

use std::path::Path;

use plimsoll_data::DataError;
use plimsoll_data::chat::{Columns, PromptTemplate, SampleEncoder, SampleOptions, TrainOn, Truncation};
use plimsoll_model::chat_template::ChatTemplate;
use plimsoll_model::tokenizer::Tokenizer;
use plimsoll_plan::config::{self, DataFormat, RawConfig};

use crate::TrainError;
use crate::prepared::buffer_bytes;

/// `data.chat_template` of plain text with headings.
const ALPACA: &str = "alpaca";

/// The encoder of a configuration's samples; `None` where its data are running text.
///
/// # Errors
/// The model has no chat template where one is needed, or `data.chat_template` is none.
pub fn sample_encoder<'a>(
    config: &RawConfig,
    tokenizer: &'a Tokenizer,
) -> Result<Option<SampleEncoder<'a>>, TrainError> {
    let data = &config.data;
    if !data.has_samples() {
        return Ok(None);
    }
    let columns = &data.columns;
    let options = SampleOptions {
        columns: Columns {
            messages: columns.messages.clone(),
            role: columns.role.clone(),
            content: columns.content.clone(),
            instruction: columns.instruction.clone(),
            input: columns.input.clone(),
            output: columns.output.clone(),
            system: columns.system.clone(),
            history: columns.history.clone(),
            prompt: columns.prompt.clone(),
            completion: columns.completion.clone(),
            tools: columns.tools.clone(),
        },
        train_on: match data.train_on() {
            config::TrainOn::Assistant => TrainOn::Assistant,
            config::TrainOn::All => TrainOn::All,
        },
        truncation: match data.truncation() {
            config::Truncation::Right => Truncation::Right,
            config::Truncation::Left => Truncation::Left,
            config::Truncation::Drop => Truncation::Drop,
            config::Truncation::Error => Truncation::Error,
        },
        sequence_length: data.sequence_length(),
        packing: data.packing(),
        max_invalid_share: data.max_invalid_share(),
        buffer_bytes: buffer_bytes(config),
    };
    Ok(Some(SampleEncoder::new(tokenizer, template(config, tokenizer)?, options)?))
}

fn template(config: &RawConfig, tokenizer: &Tokenizer) -> Result<PromptTemplate, TrainError> {
    let own = |error| TrainError::from(DataError::ChatTemplate(error));
    match config.data.chat_template.as_deref() {
        Some(ALPACA) => Ok(PromptTemplate::Alpaca),
        Some(file) => {
            let source = ChatTemplate::read_source(Path::new(file))
                .map_err(|e| TrainError::io("read data.chat_template", Path::new(file), e))?;
            Ok(PromptTemplate::Chat(Box::new(tokenizer.chat_template_from(&source, file).map_err(own)?)))
        }
        None => match tokenizer.chat_template(None).map_err(own)? {
            Some(template) => Ok(PromptTemplate::Chat(Box::new(template))),
            None if config.data.format() == DataFormat::Instruction => Ok(PromptTemplate::Alpaca),
            None => Err(DataError::NoChatTemplate { origin: tokenizer.origin().to_owned() }.into()),
        },
    }
}

#[cfg(test)]
mod tests {
    use plimsoll_plan::ModelOrigin;

    use super::*;

    /// Instructions have headings where a model has no template of its own; chats need one.
    #[test]
    fn only_instructions_do_without_a_template() {
        let folder = tempfile::tempdir().unwrap();
        let text = folder.path().join("text.txt");
        std::fs::write(&text, "word word again and again ".repeat(40)).unwrap();
        let template = |format: &str| {
            let config = format!(
                "
model:
  from_scratch: {{hidden_size: 16, intermediate_size: 24, num_hidden_layers: 1, num_attention_heads: 2}}
data: {{train: '{}', format: {format}}}
",
                text.display()
            );
            let of_texts = RawConfig::from_str(&config.replace(format, "text"), "test").unwrap();
            let origin = ModelOrigin::find(&of_texts).unwrap();
            let tokenizer = crate::tokenizer(&of_texts, &origin).unwrap();
            super::template(&RawConfig::from_str(&config, "test").unwrap(), &tokenizer)
        };
        assert!(matches!(template("instruction"), Ok(PromptTemplate::Alpaca)));
        let error = template("chat").err().unwrap();
        assert!(matches!(error, TrainError::Data(DataError::NoChatTemplate { .. })), "{error}");
    }
}
