//! What the planner has decided, as configurations of other programs. A plan goes onto a [`Sheet`], which knows what every key of the
//! configuration became; what became nothing is a note. A file per format says which keys it has words for.

mod accelerate;
mod axolotl;
mod bitsandbytes;
mod deepspeed;
mod known;
mod llama_factory;
mod peft;
mod sheet;
mod toml;
mod torchtitan;
mod torchtune;
mod trainer;
mod transformers;

use std::fmt;
use std::str::FromStr;

use serde_json::{Map, Value};

use crate::training_plan::TrainingPlan;
use sheet::Sheet;

/// Characters of a line of comments.
const WIDTH: usize = 100;

/// Whose configuration it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExportFormat {
    /// DeepSpeed's JSON.
    DeepSpeed,
    /// What `accelerate config` writes, with FSDP.
    Accelerate,
    /// Keyword arguments of `transformers.TrainingArguments`.
    Transformers,
    /// PEFT's `adapter_config.json`.
    Peft,
    /// Keyword arguments of `transformers.BitsAndBytesConfig`.
    BitsAndBytes,
    /// Axolotl's YAML.
    Axolotl,
    /// LLaMA-Factory's YAML.
    LlamaFactory,
    /// A recipe's configuration of torchtune.
    Torchtune,
    /// TorchTitan's TOML, which it read until version 0.2.
    Torchtitan,
}

/// How a format is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Syntax {
    Json,
    Yaml,
    Toml,
}

impl ExportFormat {
    /// Every one.
    pub const ALL: [ExportFormat; 9] = [
        ExportFormat::DeepSpeed,
        ExportFormat::Accelerate,
        ExportFormat::Transformers,
        ExportFormat::Peft,
        ExportFormat::BitsAndBytes,
        ExportFormat::Axolotl,
        ExportFormat::LlamaFactory,
        ExportFormat::Torchtune,
        ExportFormat::Torchtitan,
    ];

    /// What it is asked for by.
    pub fn name(self) -> &'static str {
        match self {
            ExportFormat::DeepSpeed => "deepspeed",
            ExportFormat::Accelerate => "accelerate",
            ExportFormat::Transformers => "transformers",
            ExportFormat::Peft => "peft",
            ExportFormat::BitsAndBytes => "bitsandbytes",
            ExportFormat::Axolotl => "axolotl",
            ExportFormat::LlamaFactory => "llama-factory",
            ExportFormat::Torchtune => "torchtune",
            ExportFormat::Torchtitan => "torchtitan",
        }
    }

    fn syntax(self) -> Syntax {
        match self {
            ExportFormat::DeepSpeed
            | ExportFormat::Transformers
            | ExportFormat::Peft
            | ExportFormat::BitsAndBytes => Syntax::Json,
            ExportFormat::Accelerate
            | ExportFormat::Axolotl
            | ExportFormat::LlamaFactory
            | ExportFormat::Torchtune => Syntax::Yaml,
            ExportFormat::Torchtitan => Syntax::Toml,
        }
    }
}

impl fmt::Display for ExportFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for ExportFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<ExportFormat, String> {
        let wanted = text.trim().to_ascii_lowercase().replace('_', "-");
        let same = |format: &ExportFormat| format.name().replace('-', "") == wanted.replace('-', "");
        ExportFormat::ALL.into_iter().find(same).ok_or_else(|| {
            let names: Vec<&str> = ExportFormat::ALL.iter().map(|format| format.name()).collect();
            format!("take one of {}", names.join(", "))
        })
    }
}

/// What cannot be written in a format at all.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// Adapters of a run without any.
    #[error("{format}: training.method is full, which has no adapters; set training.method to lora or qlora")]
    NoAdapters {
        /// The format.
        format: ExportFormat,
    },
    /// Quantisation of a run without any.
    #[error(
        "{format}: no weight is quantised; set training.method to qlora, or training.quantization to nf4"
    )]
    NotQuantised {
        /// The format.
        format: ExportFormat,
    },
    /// A storage that the format does not have.
    #[error(
        "{format}: frozen weights are {types}, and bitsandbytes has nf4, fp4, nf4_f32, fp4_f32 and int8; set training.quantization to one of these"
    )]
    Quantisation {
        /// The format.
        format: ExportFormat,
        /// Ours.
        types: String,
    },
    /// Adapters where the format has none.
    #[error("{format} trains all weights; set training.method to full, or take axolotl or llama-factory")]
    Adapters {
        /// The format.
        format: ExportFormat,
    },
    /// A model that the format has no name for.
    #[error("{format} makes models by name and has none of the sizes of {model}; it has {known}")]
    Model {
        /// The format.
        format: ExportFormat,
        /// The model.
        model: String,
        /// Its models.
        known: String,
    },
    /// A model without a file or a name.
    #[error("{format}: the model is made from scratch; {remedy}")]
    Scratch {
        /// The format.
        format: ExportFormat,
        /// What to do.
        remedy: &'static str,
    },
    /// What the program refuses when it starts.
    #[error("{format} refuses {what}; {remedy}")]
    Refused {
        /// The format.
        format: ExportFormat,
        /// What goes not together.
        what: &'static str,
        /// What to do.
        remedy: &'static str,
    },
    /// The document could not be made into text.
    #[error("the configuration could not be written: {0}")]
    Write(String),
}

/// A configuration for another program.
#[derive(Clone, Debug)]
pub struct Exported {
    format: ExportFormat,
    /// The keys.
    pub document: Map<String, Value>,
    /// What was exported, and how the file is used: some sentences.
    pub heading: Vec<String>,
    /// What could not be carried over, or has another meaning there: a sentence each.
    pub notes: Vec<String>,
}

impl TrainingPlan {
    /// The plan as a configuration of another program, on so many machines.
    ///
    /// # Errors
    /// Where nothing of the plan can be said in that format.
    pub fn export(&self, format: ExportFormat, machines: u64) -> Result<Exported, ExportError> {
        let mut sheet = Sheet::new(self, format, machines);
        let document = match format {
            ExportFormat::DeepSpeed => deepspeed::document(&mut sheet),
            ExportFormat::Accelerate => accelerate::document(&mut sheet),
            ExportFormat::Transformers => transformers::document(&mut sheet),
            ExportFormat::Peft => peft::document(&mut sheet)?,
            ExportFormat::BitsAndBytes => bitsandbytes::document(&mut sheet)?,
            ExportFormat::Axolotl => axolotl::document(&mut sheet)?,
            ExportFormat::LlamaFactory => llama_factory::document(&mut sheet)?,
            ExportFormat::Torchtune => torchtune::document(&mut sheet)?,
            ExportFormat::Torchtitan => torchtitan::document(&mut sheet)?,
        };
        let (heading, notes) = sheet.finish();
        Ok(Exported { format, document: document.0, heading, notes })
    }
}

impl Exported {
    /// The file. Where the format has comments, what could not be carried over is at its top.
    ///
    /// # Errors
    /// [`ExportError::Write`], where a value cannot be written.
    pub fn text(&self) -> Result<String, ExportError> {
        let wrong = |error: &dyn fmt::Display| ExportError::Write(error.to_string());
        let body = match self.format.syntax() {
            Syntax::Json => {
                let text = serde_json::to_string_pretty(&self.document).map_err(|error| wrong(&error))?;
                return Ok(text + "\n");
            }
            Syntax::Yaml => serde_saphyr::to_string(&self.document).map_err(|error| wrong(&error))?,
            Syntax::Toml => toml::text(&self.document),
        };
        let comments: String =
            self.remarks().lines().map(|line| format!("# {line}").trim_end().to_owned() + "\n").collect();
        Ok(format!("{comments}\n{body}"))
    }

    /// Whether the text says by itself what could not be carried over.
    pub fn has_comments(&self) -> bool {
        self.format.syntax() != Syntax::Json
    }

    /// The heading and the notes, for people.
    pub fn remarks(&self) -> String {
        let mut lines: Vec<String> = self.heading.iter().flat_map(|text| folded(text, "", "")).collect();
        if !self.notes.is_empty() {
            lines.push(String::new());
            lines.push("Not carried over, or with another meaning there:".to_owned());
            lines.extend(self.notes.iter().flat_map(|text| folded(text, "- ", "  ")));
        }
        lines.join("\n") + "\n"
    }
}

/// A text in lines that are not too long; words are not cut.
fn folded(text: &str, first: &str, further: &str) -> Vec<String> {
    let mut lines = Vec::new();
    let mut line = first.to_owned();
    for word in text.split_whitespace() {
        if line.chars().count() + word.chars().count() > WIDTH && line.len() > further.len().max(first.len())
        {
            lines.push(line.trim_end().to_owned());
            line = further.to_owned();
        }
        line.push_str(word);
        line.push(' ');
    }
    lines.push(line.trim_end().to_owned());
    lines
}
