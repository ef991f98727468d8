//! Where a program was when memory ran out: what its traceback and its progress say.

use serde::Serialize;

use super::message::leading_number;

/// What the program was doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Moment {
    /// Reading the model.
    Loading,
    /// A forward pass of training.
    Forward,
    /// A backward pass.
    Backward,
    /// An update.
    Update,
    /// An evaluation.
    Evaluation,
    /// Writing a checkpoint, or gathering what is written.
    Saving,
    /// Answering.
    Generation,
    /// Nobody knows.
    Unknown,
}

/// Where a program was.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Scene {
    /// What it was doing.
    pub moment: Moment,
    /// The last step that its progress has shown, where it shows steps.
    pub step: Option<u64>,
    /// Whether it was in attention that writes its scores out.
    pub attention: bool,
    /// Whether it was in the head or the loss.
    pub logits: bool,
    /// Processes that train together.
    pub ranks: u32,
}

/// The steps that a log has shown.
#[derive(Clone, Debug, Default)]
pub struct Steps {
    last: Option<u64>,
}

impl Steps {
    /// Looks at a line for a step's number.
    pub fn see(&mut self, line: &str) {
        self.last = step_of(line).or(self.last);
    }
}

/// What a frame of a traceback says, the innermost that says anything counts.
const FRAMES: [(&str, Moment); 27] = [
    ("from_pretrained", Moment::Loading),
    ("load_state_dict", Moment::Loading),
    ("load_checkpoint", Moment::Loading),
    ("_load_pretrained_model", Moment::Loading),
    ("dispatch_model", Moment::Loading),
    ("in evaluate", Moment::Evaluation),
    ("evaluation_loop", Moment::Evaluation),
    ("prediction_step", Moment::Evaluation),
    ("validation_step", Moment::Evaluation),
    ("nested_concat", Moment::Evaluation),
    ("save_pretrained", Moment::Saving),
    ("save_checkpoint", Moment::Saving),
    ("save_model", Moment::Saving),
    ("_gather_state", Moment::Saving),
    ("get_state_dict", Moment::Saving),
    ("consolidated_16bit_state_dict", Moment::Saving),
    ("in backward", Moment::Backward),
    (".backward(", Moment::Backward),
    ("run_backward", Moment::Backward),
    ("optimizer.step", Moment::Update),
    ("/optim/", Moment::Update),
    ("_init_group", Moment::Update),
    ("ops/adam", Moment::Update),
    ("in generate", Moment::Generation),
    ("training_step", Moment::Forward),
    ("compute_loss", Moment::Forward),
    ("in forward", Moment::Forward),
];

/// Moments that contain others: an evaluation has forward passes.
const OUTER: [Moment; 4] = [Moment::Evaluation, Moment::Saving, Moment::Generation, Moment::Loading];

impl Scene {
    /// From the lines before a message and the steps that were seen.
    pub(super) fn of<'l>(before: impl DoubleEndedIterator<Item = &'l str>, steps: &Steps) -> Scene {
        let lines: Vec<&str> = before.collect();
        // The traceback of this message: the last one.
        let begin = lines.iter().rposition(|line| line.contains("Traceback (most recent call last)"));
        let frames = lines.get(begin.unwrap_or(lines.len())..).unwrap_or_default();
        let of_line =
            |line: &&str| FRAMES.iter().find(|(words, _)| line.contains(words)).map(|(_, moment)| *moment);
        let seen: Vec<Moment> = frames.iter().filter_map(of_line).collect();
        let outer = seen.iter().find(|moment| OUTER.contains(moment));
        let moment = outer.or(seen.last()).copied().unwrap_or(Moment::Unknown);
        let last = frames.iter().rev().take(6);
        let any = |words: &[&str]| last.clone().any(|line| words.iter().any(|word| line.contains(word)));
        Scene {
            moment,
            step: steps.last,
            attention: any(&[
                "softmax",
                "attn_weights",
                "eager_attention",
                "torch.matmul(query",
                "scaled_dot_product",
            ]),
            logits: any(&["lm_head", "cross_entropy", "logits.float", "log_softmax", "logits = "]),
            ranks: 1,
        }
    }

    /// What it says of the cause.
    pub(super) fn words(&self) -> impl Iterator<Item = &'static str> {
        let first = self.step.is_none_or(|step| step <= 1);
        let cause = match (self.moment, first) {
            (Moment::Loading, _) => "while the model was loaded: its weights alone do not fit",
            (Moment::Evaluation, _) => {
                "in an evaluation: training fits, and the evaluation's batch, or the logits that it keeps, do not"
            }
            (Moment::Saving, _) => {
                "while saving: what is gathered for a checkpoint comes on top of what training holds"
            }
            (Moment::Generation, _) => "while answering: the cache of keys and values grows with every token",
            (Moment::Update, true) => {
                "in the first update: the optimizer makes its states then, 8 bytes a parameter with AdamW in f32"
            }
            (Moment::Unknown, _) if self.step.is_none() => {
                "the log does not say when: in the first step it is the model with its batch, later a longer sample, memory in pieces, or something that grows"
            }
            (_, true) => "in the first step: the model with its batch is too large, and every step would be",
            (_, false) => {
                "after steps that fitted: a longer sample, memory in pieces, or something that grows (losses or outputs that are kept with their graph)"
            }
        };
        let attention =
            self.attention.then_some("it was in attention, which writes a score for each pair of tokens");
        let logits = self
            .logits
            .then_some("it was in the head or the loss: logits take 4 bytes for each token and word");
        let ranks = (self.ranks > 1).then_some(
            "several processes train: with plain data parallelism each holds everything, so that more of them do not help",
        );
        [Some(cause), attention, logits, ranks].into_iter().flatten()
    }
}

/// The number of a step in a line of progress.
fn step_of(line: &str) -> Option<u64> {
    // tqdm: `  3%|▎         | 12/400 [00:31<16:12, ...`
    if let Some((_, rest)) = line.rsplit_once("| ")
        && line.contains('%')
        && let Some((done, behind)) = rest.split_once('/')
        && behind.contains('[')
        && let Ok(done) = done.trim().parse()
    {
        return Some(done);
    }
    let lower = line.to_ascii_lowercase();
    ["global_step", "step", "iteration", "iter"].into_iter().find_map(|word| {
        let (_, rest) = lower.split_once(word)?;
        let rest = rest.trim_start_matches(['"', '\'', ':', '=', ' ', '[']);
        leading_number(rest)
    })
}

/// Processes that a line says train together.
pub(super) fn ranks_of(line: &str) -> u32 {
    [
        "world_size=",
        "world_size: ",
        "WORLD_SIZE=",
        "--nproc_per_node=",
        "--nproc_per_node ",
        "--num_processes ",
    ]
    .into_iter()
    .find_map(|words| {
        let (_, rest) = line.split_once(words)?;
        leading_number(rest)
    })
    .filter(|ranks| (1..=65_536).contains(ranks))
    .unwrap_or(1)
}
