//! A conversation: its turns, and the prompt that the next answer continues.
//!
//! The prompt is always the whole conversation in the model's chat template, so that the model sees what it was
//! trained on. The [`Session`](crate::Session) knows which part of the prompt was computed before. Where the
//! conversation does not fit the context any more, the oldest turns after the system message are left out.

use plimsoll_model::chat_template::{ChatMessage, ChatOptions, ChatTemplate, ChatTemplateError};
use plimsoll_model::tokenizer::{Tokenizer, TokenizerError};

/// A conversation that gives no prompt, or messages that are no conversation.
#[derive(Debug, thiserror::Error)]
pub enum ConversationError {
    /// The template refused.
    #[error(transparent)]
    Template(#[from] ChatTemplateError),
    /// The text could not be made tokens.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// Not even the last message fits.
    #[error(
        "the message has {tokens} tokens with its template and system message, and the context holds {context}; shorten it or enlarge the context"
    )]
    TooLong {
        /// Tokens of the shortest prompt.
        tokens: usize,
        /// Tokens that the context holds.
        context: usize,
    },
    /// Messages that are no conversation.
    #[error("message {number}: {reason}")]
    Message {
        /// Which one, from 1.
        number: usize,
        /// What is wrong with it.
        reason: String,
    },
}

/// A question and its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Turn {
    /// What the user said.
    pub user: String,
    /// What the model said, if it has.
    pub assistant: Option<String>,
}

/// What the next answer continues.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// The tokens.
    pub tokens: Vec<u32>,
    /// How many of the oldest turns are not in it.
    pub dropped_turns: usize,
}

/// Turns of a user and a model, after what the system says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Conversation {
    system: Option<String>,
    turns: Vec<Turn>,
    /// How many of the first turns the prompt leaves out. More stay than what would just fit, or every turn would
    /// drop another one and the cache could never be reused.
    dropped: usize,
}

impl Conversation {
    /// A conversation in which nobody has spoken but the system.
    pub fn new(system: Option<String>) -> Conversation {
        Conversation { system, ..Conversation::default() }
    }

    /// What the system says first.
    pub fn system(&self) -> Option<&str> {
        self.system.as_deref()
    }

    /// Changes what the system says; the turns stay.
    pub fn set_system(&mut self, system: Option<String>) {
        self.system = system;
        self.dropped = 0;
    }

    /// All turns, those that prompts leave out among them.
    pub fn turns(&self) -> &[Turn] {
        &self.turns
    }

    /// A new turn of the user.
    pub fn ask(&mut self, text: impl Into<String>) {
        self.turns.push(Turn { user: text.into(), assistant: None });
    }

    /// What the model says to the last turn.
    pub fn answer(&mut self, text: impl Into<String>) {
        if let Some(last) = self.turns.last_mut() {
            last.assistant = Some(text.into());
        }
    }

    /// Takes back the last turn.
    pub fn undo(&mut self) -> Option<Turn> {
        self.dropped = 0;
        self.turns.pop()
    }

    /// Takes back the last answer; whether there is a turn to answer again.
    pub fn take_back_answer(&mut self) -> bool {
        match self.turns.last_mut() {
            Some(last) => {
                last.assistant = None;
                true
            }
            None => false,
        }
    }

    /// Forgets all turns; what the system says stays.
    pub fn reset(&mut self) {
        self.turns.clear();
        self.dropped = 0;
    }

    /// The whole conversation as messages.
    pub fn messages(&self) -> Vec<ChatMessage> {
        self.messages_from(0)
    }

    /// A conversation of messages: perhaps one of the system, then the user's and the assistant's in turn.
    ///
    /// # Errors
    /// A message is out of this order or no text.
    pub fn from_messages(messages: &[ChatMessage]) -> Result<Conversation, ConversationError> {
        let mut conversation = Conversation::default();
        for (number, message) in (1..).zip(messages) {
            let wrong = |reason: &str| ConversationError::Message { number, reason: reason.to_owned() };
            let text = message.content.as_str().ok_or_else(|| wrong("its content is no text"))?.to_owned();
            let answered = conversation.turns.last().is_none_or(|turn| turn.assistant.is_some());
            match message.role.as_str() {
                "system" if number == 1 => conversation.system = Some(text),
                "system" => return Err(wrong("only the first message can be the system's")),
                "user" if answered => conversation.ask(text),
                "user" => return Err(wrong("is the user's as the one before it")),
                "assistant" if !answered => conversation.answer(text),
                "assistant" => return Err(wrong("is the assistant's and answers nothing")),
                other => {
                    return Err(wrong(&format!("the role {other:?} is none of system, user and assistant")));
                }
            }
        }
        Ok(conversation)
    }

    /// The prompt for an answer of perhaps `reserve` tokens in a context of `context`. Where that is too much, the
    /// oldest turns are dropped until the prompt takes half of the context and leaves that room, or only the last
    /// turn is left.
    ///
    /// # Errors
    /// The template refuses the messages, or the last turn alone is too long.
    pub fn prompt(
        &mut self,
        template: &ChatTemplate,
        tokenizer: &Tokenizer,
        context: usize,
        reserve: usize,
    ) -> Result<Prompt, ConversationError> {
        let encode = |dropped: usize| -> Result<Vec<u32>, ConversationError> {
            let options = ChatOptions { add_generation_prompt: true, ..ChatOptions::default() };
            Ok(tokenizer.encode(&template.render(&self.messages_from(dropped), &options)?)?)
        };
        let mut tokens = encode(self.dropped)?;
        let room = context.saturating_sub(reserve);
        if tokens.len() > room {
            let most = room.min(context / 2);
            // The fewest turns to drop, by halving: prompts only get shorter by it.
            let (mut low, mut high) = (self.dropped, self.turns.len().saturating_sub(1));
            while low < high {
                let middle = low.midpoint(high);
                match encode(middle)?.len() <= most {
                    true => high = middle,
                    false => low = middle + 1,
                }
            }
            tokens = encode(high)?;
            self.dropped = high;
        }
        if tokens.len() >= context {
            return Err(ConversationError::TooLong { tokens: tokens.len(), context });
        }
        Ok(Prompt { tokens, dropped_turns: self.dropped })
    }

    fn messages_from(&self, dropped: usize) -> Vec<ChatMessage> {
        let system = self.system.iter().map(|text| ChatMessage::new("system", text.as_str()));
        let turns = self.turns.iter().skip(dropped).flat_map(|turn| {
            let answer = turn.assistant.iter().map(|text| ChatMessage::new("assistant", text.as_str()));
            std::iter::once(ChatMessage::new("user", turn.user.as_str())).chain(answer)
        });
        system.chain(turns).collect()
    }
}
