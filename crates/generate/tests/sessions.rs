//! Sessions and conversations on a tiny model of bytes: a cache that is used again changes no token.

use std::cell::Cell;
use std::sync::Arc;

use plimsoll_device::{Cpu, CpuOptions, DType};
use plimsoll_generate::{
    Batch, BatchSummary, Conversation, ConversationError, Draft, DraftModel, GenerateError, Generated,
    Limits, Lookup, Request, Sampler, SamplerSettings, Session, StopReason, StopStrings,
};
use plimsoll_memory::Tier;
use plimsoll_model::chat_template::ChatTemplate;
use plimsoll_model::tokenizer::Tokenizer;
use plimsoll_model::{Activation, AttentionSpec, MlpSpec, ModelSpec, NormSpec, RopeSpec, init};
use plimsoll_step::{DecodeSettings, Decoder, Precision, StepError, WeightStorage};
use proptest::prelude::*;

const CONTEXT: usize = 96;

fn spec() -> ModelSpec {
    ModelSpec {
        name: "tiny".into(),
        architecture: "llama".into(),
        vocab_size: 257,
        hidden_size: 16,
        num_layers: 2,
        attention: AttentionSpec::plain(4, 2, 4, RopeSpec::plain(4, 10_000.0)),
        mlp: MlpSpec { intermediate_size: 24, activation: Activation::Silu, gated: true, bias: false },
        experts: None,
        norm: NormSpec::rms(1e-5),
        embedding_scale: None,
        logit_soft_cap: None,
        tie_word_embeddings: true,
        max_position_embeddings: 512,
        initializer_range: 0.5,
        part: Default::default(),
        bos_token: None,
        eos_tokens: vec![],
    }
}

fn device() -> Cpu {
    Cpu::new(1 << 20, CpuOptions { threads: Some(1), isa: None }).unwrap()
}

fn session(device: &Cpu) -> Session<'_> {
    session_of(device, spec())
}

fn session_of(device: &Cpu, spec: ModelSpec) -> Session<'_> {
    Session::new(decoder_of(device, spec, SETTINGS), &SETTINGS)
}

const SETTINGS: DecodeSettings = DecodeSettings {
    cache_tier: Tier::Device,
    precision: Precision::F32,
    cache: DType::F32,
    context: CONTEXT as u64,
    prompt_chunk_tokens: 7,
    sequences: 1,
    pages: None,
    drafted_tokens: 0,
};

fn decoder_of(device: &Cpu, spec: ModelSpec, settings: DecodeSettings) -> Decoder<'_> {
    let mut decoder = Decoder::new(
        device,
        &Arc::default(),
        spec.clone(),
        settings,
        WeightStorage::new(&|_| settings.precision.weights),
    )
    .unwrap();
    decoder
        .load::<StepError>(|parameter, rows, dtype, out| {
            init::fill(parameter, rows, &spec, 3, dtype, out).unwrap();
            Ok(())
        })
        .unwrap();
    decoder
}

fn sampler(seed: u64) -> Sampler {
    Sampler::new(&SamplerSettings {
        temperature: 1.0,
        seed,
        repetition_penalty: 1.2,
        ..SamplerSettings::default()
    })
    .unwrap()
}

fn limits(max_tokens: usize) -> Limits {
    Limits { max_tokens, ..Limits::default() }
}

/// An answer and all that was shown of it.
fn answer(
    session: &mut Session<'_>,
    prompt: &[u32],
    seed: u64,
    limits: &Limits,
) -> Result<(Generated, String), GenerateError> {
    let tokenizer = Tokenizer::byte_level().unwrap();
    let mut shown = String::new();
    let generated = session.generate(&tokenizer, prompt, &mut sampler(seed), limits, &|| false, |text| {
        shown.push_str(text);
        Ok::<(), GenerateError>(())
    })?;
    Ok((generated, shown))
}

fn bytes(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

#[test]
fn only_what_is_new_is_computed_and_the_tokens_are_those_of_a_fresh_session() {
    let (device, other) = (device(), device());
    let mut session = session(&device);
    for (prompt, reused) in [
        ("a first prompt", 0),
        // The answer's last token was never put into the cache.
        ("a first prompt and more of it", 14),
        ("a first prompt and more of it", 29),
        ("a first day", 8),
        ("other", 0),
        ("other", 5),
        ("oth", 2),
    ] {
        let (prompt, limits) = (bytes(prompt), limits(9));
        let (with_cache, shown) = answer(&mut session, &prompt, 5, &limits).unwrap();
        // What was drawn may happen to continue as the next prompt does, or not.
        assert!(
            with_cache.reused_tokens >= reused && with_cache.reused_tokens <= reused + 1,
            "{with_cache:?}"
        );
        let (fresh, _) = answer(&mut self::session(&other), &prompt, 5, &limits).unwrap();
        assert_eq!((&with_cache.tokens, &with_cache.text), (&fresh.tokens, &fresh.text));
        assert_eq!((with_cache.tokens.len(), with_cache.stop_reason), (9, StopReason::MaxTokens));
        assert_eq!(shown, with_cache.text);
    }
}

#[test]
fn samples_share_the_prompt_and_have_seeds_of_their_own() {
    let device = device();
    let mut session = session(&device);
    let prompt = bytes("some prompt");
    let draw = |session: &mut Session<'_>, seed| answer(session, &prompt, seed, &limits(12)).unwrap().0;
    let first = draw(&mut session, 1);
    let second = draw(&mut session, 2);
    assert_eq!((first.reused_tokens, second.reused_tokens), (0, prompt.len()));
    assert_ne!(first.tokens, second.tokens);
    assert_eq!(draw(&mut session, 1).tokens, first.tokens);
}

#[test]
fn stop_tokens_strings_limits_and_the_context_end_an_answer_and_say_so() {
    let device = device();
    let mut session = session(&device);
    let prompt = bytes("stop me");
    // Printable bytes only, so that text and tokens are alike.
    let (free, _) = answer(&mut session, &prompt, 4, &limits(40)).unwrap();
    let (third, text) = (free.tokens[2], free.text.clone());

    let at_token = Limits { stop_tokens: vec![third], ..limits(40) };
    let (stopped, _) = answer(&mut session, &prompt, 4, &at_token).unwrap();
    let before = free.tokens.iter().position(|token| *token == third).unwrap();
    assert_eq!(stopped.tokens, free.tokens[..before]);
    assert_eq!(stopped.stop_reason, StopReason::StopToken(third));

    let (at, _) = text.char_indices().nth(5).unwrap();
    let stop: String = text[at..].chars().take(3).collect();
    let strings = StopStrings::new(vec!["never".into(), stop.clone()]).unwrap();
    let at_string = Limits { stop_strings: strings, ..limits(40) };
    let (stopped, shown) = answer(&mut session, &prompt, 4, &at_string).unwrap();
    assert_eq!(stopped.text, text[..text.find(&stop).unwrap()]);
    assert_eq!((shown, stopped.stop_reason), (stopped.text, StopReason::StopString(stop)));

    // One that never comes changes nothing.
    let strings = StopStrings::new(vec!["never".into()]).unwrap();
    let never = Limits { stop_strings: strings, ..limits(40) };
    assert_eq!(answer(&mut session, &prompt, 4, &never).unwrap().0.text, text);

    let (full, _) = answer(&mut session, &prompt, 4, &limits(usize::MAX)).unwrap();
    assert_eq!((full.tokens.len(), full.stop_reason), (CONTEXT - prompt.len(), StopReason::Context));
    assert!(answer(&mut session, &prompt, 4, &limits(0)).unwrap().0.tokens.is_empty());
}

#[test]
fn prompts_that_cannot_be_are_refused_and_leave_the_session_usable() {
    let device = device();
    let mut session = session(&device);
    let mut refused = |prompt: &[u32]| answer(&mut session, prompt, 1, &limits(3)).unwrap_err().to_string();
    assert!(refused(&[]).contains("no tokens"));
    let error = refused(&[1; CONTEXT + 1]);
    assert!(error.contains("97") && error.contains("96"), "{error}");
    // The first passes of this one succeed.
    let mut unknown = vec![1; 20];
    unknown[18] = 999;
    assert!(refused(&unknown).contains("999"));
    assert_eq!(session.cached(), [1; 14]);
    let prompt = [[1; 14].as_slice(), &[2, 3]].concat();
    let (with_cache, _) = answer(&mut session, &prompt, 1, &limits(3)).unwrap();
    assert_eq!(with_cache.reused_tokens, 14);
    let other = self::device();
    assert_eq!(
        answer(&mut self::session(&other), &prompt, 1, &limits(3)).unwrap().0.tokens,
        with_cache.tokens
    );
}

#[test]
fn an_interrupted_prompt_and_an_interrupted_answer_keep_what_was_done() {
    let device = device();
    let mut session = session(&device);
    let tokenizer = Tokenizer::byte_level().unwrap();
    let prompt = bytes("a prompt of more than one pass");
    // Asked before each pass of 7 tokens, then before every token.
    let mut after =
        |asked: usize, limits: &Limits| {
            let left = Cell::new(asked);
            let interrupted = || left.replace(left.get().saturating_sub(1)) == 0;
            let mut sampler = sampler(2);
            session
                .generate(&tokenizer, &prompt, &mut sampler, limits, &interrupted, |_| {
                    Ok::<(), GenerateError>(())
                })
                .unwrap()
        };
    let first = after(2, &limits(5));
    assert_eq!((first.tokens.len(), first.stop_reason), (0, StopReason::Interrupted));
    let second = after(3 + 2, &limits(5));
    assert_eq!((second.reused_tokens, second.tokens.len()), (14, 2));
    assert_eq!(second.stop_reason, StopReason::Interrupted);
    let third = after(100, &limits(5));
    assert_eq!((third.reused_tokens, third.stop_reason), (prompt.len(), StopReason::MaxTokens));
    assert_eq!(third.tokens[..2], second.tokens);
}

#[test]
fn rows_that_have_no_token_are_never_drawn() {
    let device = device();
    let mut session = session_of(&device, ModelSpec { vocab_size: 300, ..spec() });
    let settings = SamplerSettings { logit_bias: vec![(299, 1e9), (66, 1e6)], ..SamplerSettings::default() };
    let mut sampler = Sampler::new(&settings).unwrap();
    let tokenizer = Tokenizer::byte_level().unwrap();
    let show = |_: &str| Ok::<(), GenerateError>(());
    let generated = session.generate(&tokenizer, &[1, 2], &mut sampler, &limits(3), &|| false, show).unwrap();
    assert_eq!(generated.text, "BBB");
}

/// A batch's answers in the order of its requests.
fn answers(
    settings: DecodeSettings,
    spec: ModelSpec,
    prompts: &[Vec<u32>],
    limits: &Limits,
) -> (Vec<Generated>, BatchSummary) {
    let device = Cpu::new(1 << 22, CpuOptions { threads: Some(2), isa: None }).unwrap();
    let vocabulary = spec.vocab_size;
    let mut batch = Batch::new(decoder_of(&device, spec, settings), &settings, vocabulary);
    let seeds = (0..).zip(prompts);
    let requests =
        seeds.map(|(seed, prompt)| Request { prompt: prompt.clone(), sampler: sampler(seed) }).collect();
    let mut ended = vec![None; prompts.len()];
    let summary = batch
        .run(&Tokenizer::byte_level().unwrap(), requests, limits, |number, generated| {
            assert!(ended[number].replace(generated).is_none());
            Ok::<(), GenerateError>(())
        })
        .unwrap();
    (ended.into_iter().map(Option::unwrap).collect(), summary)
}

/// Nine prompts of different lengths, up to four at once, with pages for all and with too few: each answer is the one that its prompt has
/// alone.
#[test]
fn prompts_that_are_answered_at_once_have_the_answers_that_they_have_alone() {
    let prompts: Vec<Vec<u32>> = [3, 40, 9, 70, 1, 22, 14, 55, 8]
        .into_iter()
        .map(|length| (0..length).map(|i| (i * 7 + length) % 200).collect())
        .collect();
    // Some end early, and some with the context.
    let limits = Limits { stop_tokens: vec![66, 131], ..limits(60) };
    let windowed = {
        let mut spec = spec();
        spec.attention.sliding_window =
            Some(plimsoll_model::SlidingWindow { size: 10, layers: vec![true, false] });
        spec
    };
    for spec in [spec(), windowed] {
        let alone: Vec<Generated> = (0..)
            .zip(&prompts)
            .map(|(seed, prompt)| {
                let device = device();
                answer(&mut session_of(&device, spec.clone()), prompt, seed, &limits).unwrap().0
            })
            .collect();
        let said = |all: &[Generated]| -> Vec<_> {
            all.iter().map(|one| (one.tokens.clone(), one.text.clone(), one.stop_reason.clone())).collect()
        };
        let many = DecodeSettings { sequences: 4, ..SETTINGS };
        assert_eq!((many.page_tokens(&spec), many.most_pages(&spec), many.least_pages(&spec)), (64, 8, 5));
        for pages in [None, Some(8), Some(5), Some(2)] {
            let (all, summary) = answers(DecodeSettings { pages, ..many }, spec.clone(), &prompts, &limits);
            assert_eq!(said(&all), said(&alone), "{pages:?}");
            let tokens: u64 = alone.iter().map(|one| one.tokens.len() as u64).sum();
            assert_eq!(summary.tokens, tokens);
            match pages {
                Some(2) => assert!(summary.at_once == 2 && summary.waits > 0, "{summary:?}"),
                Some(5) => assert!(summary.at_once > 2, "{summary:?}"),
                _ => assert!(summary.at_once == 4 && summary.waits == 0, "{summary:?}"),
            }
            assert!(summary.passes < tokens);
        }
    }
}

/// A prompt whose first token ends its answer was answered all the same.
#[test]
fn answers_of_one_token_are_one_at_a_time() {
    let settings = DecodeSettings { sequences: 4, ..SETTINGS };
    let prompts = [bytes("ab"), bytes("cd"), bytes("ef")];
    let (all, summary) = answers(settings, spec(), &prompts, &limits(1));
    assert!(all.iter().all(|one| one.tokens.len() == 1));
    assert_eq!((summary.at_once, summary.tokens, summary.passes), (1, 3, 0), "{summary:?}");
}

/// Whatever chooses the token: no answer is made of what is no number.
#[test]
fn logits_that_are_not_finite_are_an_error() {
    let device = device();
    let mut decoder = decoder_of(&device, spec(), SETTINGS);
    decoder
        .load::<StepError>(|_, _, _, out| {
            out.fill(0xff);
            Ok(())
        })
        .unwrap();
    let mut session = Session::new(decoder, &SETTINGS);
    let error = answer(&mut session, &bytes("ab"), 1, &limits(4)).unwrap_err();
    assert!(matches!(error, GenerateError::NotFinite { number: 1 }), "{error}");
}

#[test]
fn a_batch_refuses_what_a_session_refuses() {
    let device = device();
    let mut batch = Batch::new(decoder_of(&device, spec(), SETTINGS), &SETTINGS, 257);
    let tokenizer = Tokenizer::byte_level().unwrap();
    let mut refused = |prompt: Vec<u32>| {
        let requests = vec![Request { prompt, sampler: sampler(1) }];
        let run = batch.run(&tokenizer, requests, &limits(3), |_, _| Ok::<(), GenerateError>(()));
        run.unwrap_err().to_string()
    };
    assert!(refused(vec![]).contains("no tokens"));
    assert!(refused(vec![1; CONTEXT + 1]).contains("97"));
    assert!(refused(vec![999]).contains("999"));
}

/// Guesses whatever it was told to: the continuation itself, with a wrong token here and there.
struct Told(Vec<u32>);

impl Draft for Told {
    fn propose(&mut self, context: &[u32], most: usize) -> Result<Vec<u32>, GenerateError> {
        let wrong = context.len() % 3;
        let next = self.0.get(context.len()..).unwrap_or_default().iter().take(most + 2);
        Ok(next.enumerate().map(|(i, token)| if i == wrong { (token + 1) % 257 } else { *token }).collect())
    }
}

#[test]
fn guesses_change_no_token_and_are_counted() {
    let windowed = {
        let mut spec = spec();
        spec.attention.sliding_window =
            Some(plimsoll_model::SlidingWindow { size: 10, layers: vec![true, false] });
        spec
    };
    let prompt = bytes("abcabcabcabc");
    for spec in [spec(), windowed] {
        let device = device();
        let mut plain = session_of(&device, spec.clone());
        for (seed, limits) in
            [(1, limits(40)), (2, limits(usize::MAX)), (3, Limits { stop_tokens: vec![66, 3], ..limits(70) })]
        {
            let (expected, _) = answer(&mut plain, &prompt, seed, &limits).unwrap();
            let told = [prompt.as_slice(), &expected.tokens].concat();
            let small = self::device();
            let smaller = Session::new(decoder_of(&small, spec.clone(), SETTINGS), &SETTINGS);
            let drafts: [Box<dyn Draft>; 3] =
                [Box::new(Told(told)), Box::new(Lookup), Box::new(DraftModel::new(smaller, 257))];
            for (which, draft) in drafts.into_iter().enumerate() {
                let other = Cpu::new(1 << 20, CpuOptions { threads: Some(2), isa: None }).unwrap();
                let settings = DecodeSettings { drafted_tokens: 5, ..SETTINGS };
                let decoder = decoder_of(&other, spec.clone(), settings);
                let mut session = Session::new(decoder, &settings).with_draft(draft);
                let (drafted, shown) = answer(&mut session, &prompt, seed, &limits).unwrap();
                assert_eq!(
                    (&drafted.tokens, &drafted.stop_reason),
                    (&expected.tokens, &expected.stop_reason)
                );
                assert_eq!(shown, expected.text);
                let count = drafted.drafted;
                assert!(count.accepted <= count.tokens, "{count:?}");
                if which == 0 && expected.tokens.len() > 9 {
                    let rate = count.acceptance_rate().unwrap();
                    assert!(count.accepted > 3 && rate > 0.1 && rate < 0.9, "{count:?}");
                }
                // What was guessed and did not come true is no longer in the cache: the next answer is as good.
                let certain = prompt.len() + expected.tokens.len();
                assert!(session.cached().len() <= certain);
                assert_eq!(session.cached()[..prompt.len()], prompt);
                let (again, _) = answer(&mut session, &prompt, seed, &limits).unwrap();
                assert_eq!(again.tokens, expected.tokens);
            }
        }
    }
}

fn template(source: &str) -> ChatTemplate {
    ChatTemplate::new(source, Default::default(), "test.jinja").unwrap()
}

const PLAIN: &str = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}";

#[test]
fn turns_of_a_conversation_reuse_the_cache_and_give_the_tokens_of_none() {
    let tokenizer = Tokenizer::byte_level().unwrap();
    let template = template(PLAIN);
    let device = device();
    let mut session = session(&device);
    let mut conversation = Conversation::new(Some("sys".into()));
    let mut last_prompt = 0;
    for (number, question) in ["one", "two", "three"].into_iter().enumerate() {
        conversation.ask(question);
        let prompt = conversation.prompt(&template, &tokenizer, CONTEXT, 8).unwrap();
        assert_eq!(prompt.dropped_turns, 0);
        let (answered, _) = answer(&mut session, &prompt.tokens, 7, &limits(8)).unwrap();
        assert!(answered.reused_tokens >= last_prompt && (number == 0) == (answered.reused_tokens == 0));
        last_prompt = prompt.tokens.len();
        let other = self::device();
        let (fresh, _) = answer(&mut self::session(&other), &prompt.tokens, 7, &limits(8)).unwrap();
        assert_eq!(answered.tokens, fresh.tokens);
        conversation.answer(answered.text);
    }
}

#[test]
fn a_full_context_drops_the_oldest_turns_but_not_the_system_message() {
    let tokenizer = Tokenizer::byte_level().unwrap();
    let template = template(PLAIN);
    let mut conversation = Conversation::new(Some("S".into()));
    let mut dropped = Vec::new();
    for number in 0..12 {
        conversation.ask(format!("question {number}"));
        let prompt = conversation.prompt(&template, &tokenizer, 100, 20).unwrap();
        let text = tokenizer.decode(&prompt.tokens).unwrap();
        let first = format!("s:S;u:question {};", prompt.dropped_turns);
        assert!(text.starts_with(&first) && text.ends_with(&format!("u:question {number};a:")), "{text}");
        assert!(prompt.tokens.len() + 20 <= 100);
        dropped.push(prompt.dropped_turns);
        conversation.answer("answer");
    }
    assert_eq!(dropped, [0, 0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10]);
    assert_eq!(conversation.messages().len(), 25);
    // What was taken back makes room again.
    (0..11).for_each(|_| drop(conversation.undo()));
    conversation.ask("again");
    assert_eq!(conversation.prompt(&template, &tokenizer, 100, 20).unwrap().dropped_turns, 0);

    conversation.ask("x".repeat(100));
    let error = conversation.prompt(&template, &tokenizer, 100, 20).unwrap_err();
    assert!(matches!(error, ConversationError::TooLong { tokens: 109, context: 100 }), "{error}");
}

#[test]
fn a_conversation_is_its_messages() {
    let mut conversation = Conversation::new(Some("be kind".into()));
    for (question, answered) in [("a", "b"), ("c", "d")] {
        conversation.ask(question);
        conversation.answer(answered);
    }
    conversation.ask("open");
    let messages = conversation.messages();
    assert_eq!(Conversation::from_messages(&messages).unwrap(), conversation);
    for (wrong, words) in
        [(&[0, 1, 1][..], "message 3"), (&[0, 2], "answers nothing"), (&[1, 2, 0], "only the first")]
    {
        let chosen: Vec<_> = wrong.iter().map(|i| messages[*i].clone()).collect();
        let error = Conversation::from_messages(&chosen).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
    assert!(conversation.take_back_answer());
    assert_eq!(conversation.undo().unwrap().user, "open");
    assert!(conversation.take_back_answer());
    assert_eq!(conversation.turns().last().unwrap().assistant, None);
    conversation.reset();
    assert!(!conversation.take_back_answer() && conversation.undo().is_none());
    assert_eq!(conversation.system(), Some("be kind"));
}

#[test]
fn a_template_that_loops_for_ever_is_an_error() {
    let source = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}";
    let mut conversation = Conversation::default();
    conversation.ask("x");
    let tokenizer = Tokenizer::byte_level().unwrap();
    let error = conversation.prompt(&template(source), &tokenizer, 100, 20).unwrap_err().to_string();
    assert!(error.contains("for ever"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn any_row_of_prompts_gives_the_tokens_of_fresh_sessions(
        prompts in proptest::collection::vec("[ab]{1,20}", 1..6),
        seed in any::<u64>(),
    ) {
        let (device, other) = (device(), device());
        let mut session = session(&device);
        for prompt in prompts {
            let prompt = bytes(&prompt);
            let (with_cache, _) = answer(&mut session, &prompt, seed, &limits(6)).unwrap();
            let (fresh, _) = answer(&mut self::session(&other), &prompt, seed, &limits(6)).unwrap();
            prop_assert_eq!(with_cache.tokens, fresh.tokens);
        }
    }
}
