//! From a record to tokens, each with its weight in the loss.

use std::collections::HashSet;
use std::ops::Range;

use plimsoll_model::chat_template::ChatTemplate;
use plimsoll_model::tokenizer::Tokenizer;
use serde_json::{Map, Value};

use super::fields::{self, Reading, Sample};
use super::render::{self, Rendered, Span, Unwritten};
use super::{Columns, SampleReport, Skip, SkipReason, check_share};
use crate::DataError;
use crate::files::{Wanted, expand};
use crate::records::{self, Record, RecordPlace};

/// Instructions as plain text (Taori et al. 2023, "Stanford Alpaca"), for models without a chat template. An answer
/// ends with the end-of-text token.
const ALPACA: &str = r"
{{- sequence_begins }}
{%- for message in messages -%}
  {%- if message.role == 'system' -%}
    {{- message.content ~ '\n\n' -}}
  {%- elif message.role == 'user' -%}
    {%- if loop.first and message.input -%}
      {{- 'Below is an instruction that describes a task, paired with an input that provides further context. Write a response that appropriately completes the request.\n\n' -}}
    {%- elif loop.first -%}
      {{- 'Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n' -}}
    {%- endif -%}
    {{- '### Instruction:\n' ~ message.content ~ '\n\n' -}}
    {%- if message.input -%}{{- '### Input:\n' ~ message.input ~ '\n\n' -}}{%- endif -%}
    {{- '### Response:\n' -}}
  {%- elif message.role == 'assistant' -%}
    {%- generation -%}{{- message.content ~ eos_token -}}{%- endgeneration -%}
    {%- if not loop.last -%}{{- '\n\n' -}}{%- endif -%}
  {%- else -%}
    {{- raise_exception('only system, user and assistant are known, not ' ~ message.role) -}}
  {%- endif -%}
{%- endfor -%}
";

/// Which tokens are trained.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TrainOn {
    /// What the assistant says.
    #[default]
    Assistant,
    /// Everything.
    All,
}

/// What happens to a sample that is longer than a sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Truncation {
    /// Its end is cut off.
    #[default]
    Right,
    /// Its beginning is cut off.
    Left,
    /// It is left out.
    Drop,
    /// It ends the run.
    Error,
}

/// The template that samples are written in.
#[derive(Debug)]
pub enum PromptTemplate {
    /// A chat template.
    Chat(Box<ChatTemplate>),
    /// Plain text with headings.
    Alpaca,
}

/// How samples become sequences.
#[derive(Clone, Debug, PartialEq)]
pub struct SampleOptions {
    /// Names of columns.
    pub columns: Columns,
    /// Which tokens are trained.
    pub train_on: TrainOn,
    /// What happens to samples that are too long.
    pub truncation: Truncation,
    /// Tokens of a sequence.
    pub sequence_length: u64,
    /// Whether samples share sequences.
    pub packing: bool,
    /// The share of records that may be no samples at all and are left out.
    pub max_invalid_share: f64,
    /// Bytes between a file and its reader.
    pub buffer_bytes: usize,
}

/// A sample ready for training.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EncodedSample {
    /// The text as the template writes it, before it is cut.
    pub text: String,
    /// Token ids.
    pub tokens: Vec<u32>,
    /// The bytes of the text that each token stands for.
    pub offsets: Vec<Range<usize>>,
    /// Weight of each token in the loss; 0: not trained.
    pub weights: Vec<f32>,
    /// Whether it was cut to the length of a sequence.
    pub truncated: bool,
    /// Whether it has tools that the template does not write.
    pub tools_not_written: bool,
}

impl EncodedSample {
    /// Tokens that count in the loss. The first token of a sample never does: nothing predicts it.
    pub fn trained_tokens(&self) -> u64 {
        self.weights.iter().skip(1).filter(|weight| **weight > 0.0).count() as u64
    }
}

/// Turns records into tokens.
#[derive(Debug)]
pub struct SampleEncoder<'a> {
    tokenizer: &'a Tokenizer,
    template: ChatTemplate,
    separate_input: bool,
    options: SampleOptions,
    special: HashSet<u32>,
    /// The texts of the tokens that a sequence begins and ends with.
    begins: String,
    ends: Option<String>,
}

impl<'a> SampleEncoder<'a> {
    /// An encoder for a model's tokenizer.
    ///
    /// # Errors
    /// Plain text is asked for, and the tokenizer has no token to end an answer with.
    pub fn new(
        tokenizer: &'a Tokenizer,
        template: PromptTemplate,
        options: SampleOptions,
    ) -> Result<SampleEncoder<'a>, DataError> {
        let text = |id: u32| tokenizer.id_to_token(id);
        let ends = tokenizer.eos_token().and_then(text);
        let (template, separate_input) = match template {
            // Chat templates take an instruction and its input as one message.
            PromptTemplate::Chat(template) => (*template, false),
            PromptTemplate::Alpaca if ends.is_none() => return Err(DataError::NoEndOfText),
            PromptTemplate::Alpaca => (tokenizer.chat_template_from(ALPACA, "the alpaca template")?, true),
        };
        let special = tokenizer.all_special_tokens().into_iter().map(|token| token.id);
        let special = special.chain(tokenizer.eos_tokens().iter().copied()).collect();
        let begins = tokenizer.special_tokens_around().0.iter().filter_map(|id| text(*id)).collect();
        Ok(SampleEncoder { tokenizer, template, separate_input, options, special, begins, ends })
    }

    /// What it was made with.
    pub fn options(&self) -> &SampleOptions {
        &self.options
    }

    /// The padding token; nothing attends to it and it is not trained.
    pub fn padding(&self) -> u32 {
        self.tokenizer.pad_token().or(self.tokenizer.eos_token()).unwrap_or(0)
    }

    /// Calls `each` with every sample of the files that the patterns stand for, in order, and says what became of them.
    ///
    /// # Errors
    /// A file cannot be read, or too much of it is something else than samples; or whatever `each` answers.
    pub fn for_each(
        &self,
        patterns: &[String],
        each: &mut dyn FnMut(&RecordPlace, &EncodedSample) -> Result<(), DataError>,
    ) -> Result<SampleReport, DataError> {
        let mut report = SampleReport::default();
        let files = expand(patterns, Wanted::Records)?;
        for file in &files {
            records::for_each(file, self.options.buffer_bytes, &mut |place, record| {
                let encoded = match record {
                    Ok(record) => self.encode(&record, &place)?,
                    Err(reason) => Err(Skip::new(SkipReason::Unreadable, reason)),
                };
                match encoded {
                    Err(skip) => report.skip(&place, skip),
                    Ok(sample) => {
                        report.samples += 1;
                        report.kept += 1;
                        report.truncated += u64::from(sample.truncated);
                        report.tools_not_written += u64::from(sample.tools_not_written);
                        report.tokens += sample.tokens.len() as u64;
                        report.trained_tokens += sample.trained_tokens();
                        each(&place, &sample)?;
                    }
                }
                Ok(())
            })?;
        }
        if report.samples == 0 {
            let path = files.first().map(|file| file.path.clone()).unwrap_or_default();
            return Err(DataError::NoneThere { path });
        }
        check_share(&report.skipped, report.samples, self.options.max_invalid_share)?;
        if report.kept == 0 {
            let example = report.skipped.first().and_then(|skipped| {
                skipped.examples.first().map(|example| format!("{}: {example}", skipped.reason))
            });
            let first = example.unwrap_or_default();
            return Err(DataError::NothingToTrain { samples: report.samples, first });
        }
        Ok(report)
    }

    /// The tokens of a record, or why it is left out.
    ///
    /// # Errors
    /// The template goes beyond its bounds, the tokenizer refuses its text, or it is too long where that is an error.
    pub fn encode(
        &self,
        record: &Record,
        place: &RecordPlace,
    ) -> Result<Result<EncodedSample, Skip>, DataError> {
        let reading = Reading {
            columns: &self.options.columns,
            train_on: self.options.train_on,
            separate_input: self.separate_input,
            tool_calls: self.template.mentions("tool_calls"),
        };
        let sample = match fields::sample(record, reading) {
            Ok(sample) => sample,
            Err(skip) => return Ok(Err(skip)),
        };
        let tools_not_written =
            matches!(&sample, Sample::Chat { tools: Some(_), .. }) && !self.template.mentions("tools");
        let known = |role: &str| self.template.mentions(role);
        if let Err(skip) = sample.check(&known) {
            return Ok(Err(skip));
        }
        let rendered = match self.render(sample) {
            Ok(rendered) => rendered,
            Err(Unwritten::Skip(skip)) => return Ok(Err(skip)),
            Err(Unwritten::Unbounded(error)) => return Err(error.into()),
        };
        let mut encoded = self.weigh(rendered)?;
        encoded.tools_not_written = tools_not_written;
        self.cut(encoded, place)
    }

    /// The text of a sample.
    fn render(&self, sample: Sample) -> Result<Rendered, Unwritten> {
        match sample {
            Sample::Chat { turns, tools } => {
                let mut variables = Map::new();
                variables.insert("sequence_begins".to_owned(), Value::String(self.begins.clone()));
                render::chat(&self.template, &turns, tools, variables, self.options.train_on)
            }
            Sample::Text { prompt, completion } => {
                let before = match self.options.train_on {
                    TrainOn::Assistant => self.begins.len() + prompt.len(),
                    TrainOn::All => 0,
                };
                let ends = self.ends.as_deref().unwrap_or_default();
                let text = format!("{}{prompt}{completion}{ends}", self.begins);
                let spans = vec![Span { bytes: before..text.len(), weight: 1.0, trim: false }];
                Ok(Rendered { text, spans })
            }
        }
    }

    /// The tokens of a text; a token counts if any character of it does, as in `transformers`.
    fn weigh(&self, rendered: Rendered) -> Result<EncodedSample, DataError> {
        let Rendered { text, spans } = rendered;
        let encoded = self.tokenizer.encode_with_offsets(&text)?;
        let (tokens, offsets) = (encoded.ids, encoded.offsets);
        let mut weights = vec![0.0; tokens.len()];
        for Span { bytes, weight, trim } in spans {
            let first = offsets.partition_point(|token| token.end <= bytes.start);
            let count =
                offsets.get(first..).unwrap_or_default().partition_point(|token| token.start < bytes.end);
            let mut end = first + count;
            if trim {
                end = self.without_white_space(&text, &tokens, &offsets, first..end);
            }
            if let Some(weights) = weights.get_mut(first..end) {
                weights.fill(weight);
            }
        }
        Ok(EncodedSample { text, tokens, offsets, weights, ..EncodedSample::default() })
    }

    /// The end of a turn's tokens without white space after its last special token, which ends what a model says.
    fn without_white_space(
        &self,
        text: &str,
        tokens: &[u32],
        offsets: &[Range<usize>],
        turn: Range<usize>,
    ) -> usize {
        for end in turn.clone().rev() {
            if tokens.get(end).is_some_and(|token| self.special.contains(token)) {
                return end + 1;
            }
            let bytes = offsets.get(end).cloned().unwrap_or_default();
            if !text.get(bytes).is_some_and(|piece| piece.trim().is_empty()) {
                break;
            }
        }
        turn.end
    }

    /// The sample in the length of a sequence.
    fn cut(
        &self,
        mut sample: EncodedSample,
        place: &RecordPlace,
    ) -> Result<Result<EncodedSample, Skip>, DataError> {
        let length = usize::try_from(self.options.sequence_length).unwrap_or(usize::MAX);
        let tokens = sample.tokens.len();
        if tokens > length {
            match self.options.truncation {
                Truncation::Right => {
                    sample.tokens.truncate(length);
                    sample.offsets.truncate(length);
                    sample.weights.truncate(length);
                }
                Truncation::Left => {
                    let over = tokens - length;
                    sample.tokens.drain(..over);
                    sample.offsets.drain(..over);
                    sample.weights.drain(..over);
                }
                Truncation::Drop => {
                    let detail = format!("{tokens} tokens, more than {length}");
                    return Ok(Err(Skip::new(SkipReason::TooLong, detail)));
                }
                Truncation::Error => {
                    let sequence_length = self.options.sequence_length;
                    return Err(DataError::TooLong { place: place.clone(), tokens, sequence_length });
                }
            }
            sample.truncated = true;
        }
        if sample.trained_tokens() == 0 {
            let detail = match sample.truncated {
                true => format!("of {tokens} tokens, none of the {length} that are left is trained"),
                false => "no token of it counts in the loss".to_owned(),
            };
            return Ok(Err(Skip::new(SkipReason::NothingTrained, detail)));
        }
        Ok(Ok(sample))
    }
}
