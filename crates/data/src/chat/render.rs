//! From turns to the text that the model reads, and which bytes of it count in the loss.
//!
//! A template with `{% generation %}` blocks says itself what the assistant says. With other templates the chat is rendered
//! twice for each turn: up to the turn, with the beginning of an answer, and through the turn. Where both texts are
//! beginnings of the whole text, the turn is what lies between their ends. A template may write a turn differently
//! depending on later turns (templates that leave out earlier thoughts do). Then a character that occurs nowhere else takes
//! the place of the turn's content: it shows where the content is and what the template writes after the content.

use std::ops::Range;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use plimsoll_model::chat_template::{ChatMessage, ChatOptions, ChatTemplate, ChatTemplateError};
use serde_json::{Map, Value};

use super::fields::Turn;
use super::{Skip, SkipReason, TrainOn};

/// The date that templates write: 26 July 2024, which Llama's templates write where there is no clock. So a run that
/// is resumed on another day reads the same texts.
const TODAY: Duration = Duration::from_secs(1_721_952_000);

/// A text and which parts of it count in the loss.
#[derive(Clone, Debug, PartialEq)]
pub struct Rendered {
    pub text: String,
    /// In order; a later span wins.
    pub spans: Vec<Span>,
}

/// A part of a text.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    pub bytes: Range<usize>,
    /// Weight of its tokens in the loss.
    pub weight: f32,
    /// Whether white space after its last special token is no part of what is said.
    pub trim: bool,
}

/// A chat as its template writes it.
pub fn chat(
    template: &ChatTemplate,
    turns: &[Turn],
    tools: Option<Value>,
    variables: Map<String, Value>,
    train_on: TrainOn,
) -> Result<Rendered, Unwritten> {
    let messages = turns.iter().map(|turn| turn.message.clone()).collect();
    let now: SystemTime = UNIX_EPOCH + TODAY;
    let options = ChatOptions { add_generation_prompt: false, tools, variables, now: Some(now) };
    let chat = Chat { template, messages, options };
    // The spans that are wanted: with everything trained, those that count otherwise.
    let wanted: Vec<(usize, f32)> = (0..)
        .zip(turns)
        .filter_map(|(i, turn)| match train_on {
            TrainOn::All => turn.weight.map(|weight| (i, weight)),
            TrainOn::Assistant => {
                let usual = if turn.message.role == "assistant" { 1.0 } else { 0.0 };
                Some((i, turn.weight.unwrap_or(usual))).filter(|(_, weight)| *weight > 0.0)
            }
        })
        .collect();
    let assistants = |i: usize| turns.get(i).is_some_and(|turn| turn.message.role == "assistant");
    if template.marks_generation()
        && train_on == TrainOn::Assistant
        && wanted.iter().all(|(i, _)| assistants(*i))
    {
        return chat.marked(turns);
    }
    let text = chat.render(chat.messages.len(), false).map_err(refused)?;
    let mut spans = Vec::new();
    if train_on == TrainOn::All {
        spans.push(Span { bytes: 0..text.len(), weight: 1.0, trim: false });
    }
    for (i, weight) in wanted {
        spans.push(Span { bytes: chat.turn(&text, i)?, weight, trim: train_on == TrainOn::Assistant });
    }
    Ok(Rendered { text, spans })
}

/// Why a chat has no text.
#[derive(Debug)]
pub enum Unwritten {
    /// This one is left out.
    Skip(Skip),
    /// The template went beyond its bounds, and will with the next chat, too.
    Unbounded(ChatTemplateError),
}

impl From<Skip> for Unwritten {
    fn from(skip: Skip) -> Unwritten {
        Unwritten::Skip(skip)
    }
}

fn refused(error: ChatTemplateError) -> Unwritten {
    match error {
        ChatTemplateError::TooLong { .. } | ChatTemplateError::TooLarge { .. } => Unwritten::Unbounded(error),
        _ => Unwritten::Skip(Skip::new(SkipReason::Template, error.to_string())),
    }
}

struct Chat<'a> {
    template: &'a ChatTemplate,
    messages: Vec<ChatMessage>,
    options: ChatOptions,
}

impl Chat<'_> {
    /// The text of the first messages.
    fn render(&self, messages: usize, prompt: bool) -> Result<String, ChatTemplateError> {
        let options = ChatOptions { add_generation_prompt: prompt, ..self.options.clone() };
        self.template.render(self.messages.get(..messages).unwrap_or_default(), &options)
    }

    /// The text with what its template marks.
    fn marked(&self, turns: &[Turn]) -> Result<Rendered, Unwritten> {
        let marked = self.template.render_marked(&self.messages, &self.options).map_err(refused)?;
        let answers = turns.iter().filter(|turn| turn.message.role == "assistant");
        let weights: Vec<f32> = answers.map(|turn| turn.weight.unwrap_or(1.0)).collect();
        let (blocks, answers) = (marked.generated.len(), weights.len());
        let alike = weights.iter().all(|weight| *weight == 1.0);
        if blocks != answers && !alike {
            return Err(Unwritten::Skip(Skip::new(
                SkipReason::Template,
                format!("{answers} assistant turns with weights became {blocks} {{% generation %}} blocks"),
            )));
        }
        let weights = weights.into_iter().chain(std::iter::repeat(1.0));
        let spans = marked.generated.into_iter().zip(weights);
        let spans = spans.map(|(bytes, weight)| Span { bytes, weight, trim: false }).collect();
        Ok(Rendered { text: marked.text, spans })
    }

    /// Where a message is in the text of all.
    fn turn(&self, text: &str, index: usize) -> Result<Range<usize>, Skip> {
        let last = index + 1 == self.messages.len();
        let prompted = self.messages.get(index).is_some_and(|message| message.role == "assistant");
        let start = self.start(text, index, prompted);
        let end = if last { Some(text.len()) } else { self.end(text, index) };
        let found = match (start, end) {
            (Some(start), Some(end)) => Some(start..end),
            (start, end) => self.content(text, index).map(|content| {
                start.unwrap_or(content.bytes.start)..end.unwrap_or(content.bytes.end + content.closing)
            }),
        };
        found.filter(|bytes| bytes.start < bytes.end && text.get(bytes.clone()).is_some()).ok_or_else(|| {
            Skip::new(
                SkipReason::Template,
                format!(
                    "message {}: the chat template writes it so differently with what follows it that its text cannot be found; mark it with {{% generation %}} in a template of your own (data.chat_template)",
                    index + 1
                ),
            )
        })
    }

    /// The end of the text up to a message, if that is a beginning of the whole text.
    fn start(&self, text: &str, index: usize, prompted: bool) -> Option<usize> {
        if index == 0 && !prompted {
            return Some(self.first_start(text).unwrap_or(0));
        }
        let before = self.render(index, prompted).ok()?;
        // A template without a beginning of answers would have the name of the speaker trained.
        if prompted && self.render(index, false).is_ok_and(|unprompted| unprompted == before) {
            return None;
        }
        text.starts_with(&before).then_some(before.len())
    }

    /// Where the first message of a user begins: a template may write a system's message of its own before it, which is none of the
    /// user's. What opens a later turn of the user opens the first one, too, if that can be found.
    fn first_start(&self, text: &str) -> Option<usize> {
        let first = self.messages.first().filter(|message| message.role == "user")?;
        let content = self.content(text, 0)?.bytes.start;
        let before = text.get(..content)?;
        let mark = ('\u{f0000}'..='\u{ffffd}').find(|c| !text.contains(*c))?.to_string();
        let again = ChatMessage { content: mark.clone().into(), ..first.clone() };
        let two = [first.clone(), ChatMessage::new("assistant", "a")];
        let three = [&two[..], &[again]].concat();
        let [two, three] =
            [&two[..], &three].map(|messages| self.template.render(messages, &self.options).ok());
        let opening = three?.strip_prefix(&two?)?.split(&mark).next()?.to_owned();
        Some(before.strip_suffix(&opening).map_or(content, str::len))
    }

    /// The end of the text through a message, if that is a beginning of the whole text.
    fn end(&self, text: &str, index: usize) -> Option<usize> {
        let through = self.render(index + 1, false).ok()?;
        text.starts_with(&through).then_some(through.len())
    }

    /// Where the content of a message is, and how many bytes after it close the turn.
    fn content(&self, text: &str, index: usize) -> Option<Content> {
        let mark = ('\u{f0000}'..='\u{ffffd}').find(|c| !text.contains(*c))?;
        let marked = |messages: usize| {
            let mut messages = self.messages.get(..messages)?.to_vec();
            messages.get_mut(index)?.content = mark.to_string().into();
            let text = self.template.render(&messages, &self.options).ok()?;
            let mut parts = text.split(mark).map(str::to_owned);
            let cut = (parts.next()?, parts.next()?);
            parts.next().is_none().then_some(cut)
        };
        let (before, after) = marked(self.messages.len())?;
        let inside = before.len().checked_add(after.len()).is_some_and(|around| around <= text.len());
        if !inside || !text.starts_with(&before) || !text.ends_with(&after) {
            return None;
        }
        // What closes the turn is what comes after the content where nothing follows it, as far as both agree.
        let (_, closing) = marked(index + 1)?;
        let same = closing.bytes().zip(after.bytes()).take_while(|(a, b)| a == b).count();
        let closing = after.floor_char_boundary(same);
        Some(Content { bytes: before.len()..text.len() - after.len(), closing })
    }
}

struct Content {
    bytes: Range<usize>,
    closing: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHATML: &str = "{% for m in messages %}{{ '<' + m.role + '>' + m.content + '</>\n' }}{% endfor %}\
        {% if add_generation_prompt %}<assistant>{% endif %}";

    fn spans(
        template: &str,
        turns: &[(&str, &str, Option<f32>)],
        train_on: TrainOn,
    ) -> Result<Vec<String>, String> {
        let template = ChatTemplate::new(template, Map::new(), "test").unwrap();
        let turns: Vec<Turn> = turns
            .iter()
            .map(|(role, content, weight)| Turn {
                message: ChatMessage::new(*role, *content),
                weight: *weight,
            })
            .collect();
        let written = chat(&template, &turns, None, Map::new(), train_on);
        let rendered = written.map_err(|unwritten| match unwritten {
            Unwritten::Skip(skip) => skip.detail,
            Unwritten::Unbounded(error) => error.to_string(),
        })?;
        let show = |span: &Span| format!("{}*{}", span.weight, &rendered.text[span.bytes.clone()]);
        Ok(rendered.spans.iter().map(show).collect())
    }

    const TWO: [(&str, &str, Option<f32>); 4] =
        [("user", "a", None), ("assistant", "b", None), ("user", "c", None), ("assistant", "d", None)];

    #[test]
    fn turns_are_found_between_beginnings() {
        assert_eq!(spans(CHATML, &TWO, TrainOn::Assistant).unwrap(), ["1*b</>\n", "1*d</>\n"]);
        let whole = "1*<user>a</>\n<assistant>b</>\n<user>c</>\n<assistant>d</>\n";
        assert_eq!(spans(CHATML, &TWO, TrainOn::All).unwrap(), [whole]);
        let weighted =
            [("user", "a", Some(0.5)), ("assistant", "b", Some(0.0)), ("assistant", "d", Some(2.0))];
        let found = spans(CHATML, &weighted, TrainOn::Assistant).unwrap();
        assert_eq!(found, ["0.5*<user>a</>\n", "2*d</>\n"]);
        assert_eq!(spans(CHATML, &weighted, TrainOn::All).unwrap().len(), 4);
    }

    #[test]
    fn what_a_template_writes_before_the_first_turn_is_not_the_users() {
        let system =
            "{% if messages[0].role != 'system' %}<system>You are kind.</>\n{% endif %}".to_owned() + CHATML;
        let weighted = [("user", "a", Some(0.5)), ("assistant", "b", Some(0.0)), ("user", "c", Some(2.0))];
        let found = spans(&system, &weighted, TrainOn::Assistant).unwrap();
        assert_eq!(found, ["0.5*<user>a</>\n", "2*<user>c</>\n"]);
        let heading = CHATML.replace("'<'", "('Below is a task.' if loop.first else '') + '<'");
        assert_eq!(spans(&heading, &weighted, TrainOn::Assistant).unwrap(), found);
        // Of a template that writes every turn in another way, the content is what is found.
        let numbered = CHATML.replace("'<'", "loop.index ~ '<'");
        assert_eq!(spans(&numbered, &weighted[..2], TrainOn::Assistant).unwrap(), ["0.5*a</>\n"]);
        let said = [("system", "s", Some(0.5)), ("user", "a", None), ("assistant", "b", Some(0.0))];
        assert_eq!(spans(CHATML, &said, TrainOn::Assistant).unwrap(), ["0.5*<system>s</>\n"]);
    }

    #[test]
    fn marks_win() {
        let marked = CHATML.replace("{{ '<' + m.role + '>' + m.content + '</>\n' }}",
            "<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</>{% endgeneration %}{% endif %}\n");
        assert_eq!(spans(&marked, &TWO, TrainOn::Assistant).unwrap(), ["1*b</>", "1*d</>"]);
        let mut weighted = TWO;
        weighted[1].2 = Some(0.0);
        assert_eq!(spans(&marked, &weighted, TrainOn::Assistant).unwrap(), ["0*b</>", "1*d</>"]);
    }

    #[test]
    fn a_template_without_a_beginning_of_answers_trains_no_names() {
        let plain = CHATML.split("{% if add").next().unwrap();
        assert_eq!(spans(plain, &TWO, TrainOn::Assistant).unwrap(), ["1*b</>\n", "1*d</>\n"]);
    }

    #[test]
    fn turns_that_depend_on_what_follows_are_found_by_their_content() {
        let thinking = CHATML.replace(
            "m.content + ",
            "('[think]' if loop.last and m.role == 'assistant' else '') + m.content + ",
        );
        assert_eq!(spans(&thinking, &TWO, TrainOn::Assistant).unwrap(), ["1*b</>\n", "1*[think]d</>\n"]);
    }

    #[test]
    fn what_cannot_be_found_or_written_is_said() {
        let lost = "{% for m in messages %}{{ m.content | length }}{{ messages | length }}{% endfor %}";
        assert!(
            spans(lost, &TWO, TrainOn::Assistant).unwrap_err().starts_with("message 2: the chat template")
        );
        let refuses = "{{ raise_exception('no') }}";
        assert!(spans(refuses, &TWO, TrainOn::Assistant).unwrap_err().contains("refuses the messages: no"));
    }
}
