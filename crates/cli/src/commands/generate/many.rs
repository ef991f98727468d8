//! All prompts of a file, several at once: what is said of them, and when.

use std::collections::BTreeMap;
use std::io::IsTerminal;

use plimsoll_generate::{Batch, Generated, Limits, Request, Sampler, SamplerSettings};
use plimsoll_model::tokenizer::Tokenizer;
use serde_json::Value;

use super::Prompt;
use super::document::{self, Document};
use crate::args::GenerateArgs;
use crate::failure::Failure;
use crate::output::{errln, outln};
use crate::progress;
use crate::streaming;

/// What is the same for all prompts.
pub struct Many<'r> {
    pub args: &'r GenerateArgs,
    pub tokenizer: &'r Tokenizer,
    pub settings: SamplerSettings,
    pub limits: Limits,
    pub document: Document,
    /// Whether what was done is told, too: other ranks have done the same.
    pub tells: bool,
}

impl Many<'_> {
    fn seed(&self, sample: u64) -> u64 {
        self.settings.seed.wrapping_add(sample)
    }

    /// Answers every prompt: as one JSON document; for people each as it ends; else an object a line in the order of the prompts.
    pub fn answer(&self, mut batch: Batch<'_>, prompts: &[Prompt]) -> Result<(), Failure> {
        let samples = self.args.samples;
        let mut requests = Vec::new();
        for prompt in prompts {
            for sample in 0..samples {
                let settings = SamplerSettings { seed: self.seed(sample), ..self.settings.clone() };
                requests.push(Request { prompt: prompt.tokens.clone(), sampler: Sampler::new(&settings)? });
            }
        }
        let is_read = !self.args.json && std::io::stdout().is_terminal();
        let bar = progress::counter(requests.len() as u64, "answers", self.args.json || !self.tells);
        // Samples of a prompt follow each other.
        let place = |number: usize| (number as u64 / samples, number as u64 % samples);
        let mut done: BTreeMap<u64, BTreeMap<u64, Value>> = BTreeMap::new();
        let (mut documents, mut next) = (Vec::new(), 0);
        let summary = batch.run(self.tokenizer, requests, &self.limits, |number, generated| {
            let (place, sample) = place(number);
            bar.inc(1);
            let Some(prompt) = prompts.get(place as usize) else { return Ok(()) };
            if is_read {
                return bar.suspend(|| self.show((place, prompts.len()), sample, prompt, &generated));
            }
            let own = done.entry(place).or_default();
            own.insert(sample, document::sample(&generated, self.seed(sample), false));
            while let Some(all) = done.remove(&next) {
                if (all.len() as u64) < samples {
                    done.insert(next, all);
                    break;
                }
                let Some(prompt) = prompts.get(next as usize) else { break };
                let own =
                    document::with_prompt(prompt, self.document.of(prompt, all.into_values().collect()));
                match self.args.json {
                    true => documents.push(own),
                    false => outln!("{own}")?,
                }
                next += 1;
            }
            Ok::<(), Failure>(())
        })?;
        bar.finish_and_clear();
        if self.args.json {
            let fields = self.document.batch(&summary);
            documents.iter_mut().for_each(|own| document::merge(own, fields.clone()));
            return outln!("{}", Value::from(documents));
        }
        if !self.tells {
            return Ok(());
        }
        let waited = match summary.waits {
            0 => String::new(),
            waits => format!("; {waits} times a sequence waited for pages of the cache"),
        };
        errln!(
            "{} answers, {} tokens in {:.2} s: {:.1} tokens/s, up to {} at once{waited}",
            prompts.len() as u64 * samples,
            summary.tokens,
            summary.seconds,
            summary.tokens_per_second(),
            summary.at_once,
        );
        if let Some(streaming) = &self.document.streaming {
            streaming.report();
            if let Some(traffic) = batch.expert_traffic() {
                streaming::report_experts(traffic);
            }
        }
        Ok(())
    }

    /// An answer for people.
    fn show(
        &self,
        (place, count): (u64, usize),
        sample: u64,
        prompt: &Prompt,
        generated: &Generated,
    ) -> Result<(), Failure> {
        let of_sample = match self.args.samples {
            1 => String::new(),
            samples => format!(", sample {} of {samples}", sample + 1),
        };
        outln!("--- prompt {} of {count}{of_sample}", place + 1)?;
        let between = if self.args.chat { "\n" } else { "" };
        outln!("{}{between}{}", prompt.text, generated.text)
    }
}
