//! Templates of the shapes that common families have, and what they make of a chat.

use std::time::{Duration, UNIX_EPOCH};

use plimsoll_model::chat_template::{ChatMessage, ChatOptions, ChatTemplate, ChatTemplateError};
use plimsoll_model::tokenizer::{GgufTokenizerFields, Tokenizer};
use serde_json::json;

use crate::{special_tokens, template};

/// SmolLM2 and others: ChatML, with a system message where there is none.
const CHATML: &str = "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}\
    {{ '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}{% endif %}\
    {{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

/// Llama 3: headers, trimmed contents, the first one after the beginning of the sequence.
const LLAMA3: &str = "{% set loop_messages = messages %}{% for message in loop_messages %}\
    {% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' %}\
    {% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}";

/// Mistral: turns must alternate; the system message is part of the first one.
const MISTRAL: &str = "{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}

{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {%- if loop.first and system_message is defined %}
            {{- ' [INST] ' + system_message + '\\n\\n' + message['content'] + ' [/INST]' }}
        {%- else %}
            {{- ' [INST] ' + message['content'] + ' [/INST]' }}
        {%- endif %}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + message['content'] + eos_token}}
    {%- else %}
        {{- raise_exception('only user and assistant roles are known') }}
    {%- endif %}
{%- endfor %}
";

/// Gemma: the assistant is the model, there is no system role.
const GEMMA: &str = "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}\
    {% for message in messages %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}\
    {% else %}{% set role = message['role'] %}{% endif %}\
    {{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}\
    {% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}";

/// Qwen 2.5: ChatML with tools, over many lines.
const QWEN25: &str = "{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {{- \"# Tools\\n<tools>\" }}
    {%- for tool in tools %}
        {{- \"\\n\" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- \"\\n</tools><|im_end|>\\n\" }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == \"user\") or (message.role == \"system\") or (message.role == \"assistant\" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == \"assistant\" %}
        {{- '<|im_start|>' + message.role }}
        {%- for tool_call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{\"name\": \"' }}
            {{- tool_call.function.name }}
            {{- '\", \"arguments\": ' }}
            {{- tool_call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
";

/// Phi 3: blocks on lines of their own, which leave no white space.
const PHI3: &str = "{% for message in messages %}
  {% if message['role'] == 'system' and message['content'] %}
{{'<|system|>\\n' + message['content'] + '<|end|>\\n'}}{% elif message['role'] == 'user' %}
{{'<|user|>\\n' + message['content'] + '<|end|>\\n'}}{% elif message['role'] == 'assistant' %}
{{'<|assistant|>\\n' + message['content'] + '<|end|>\\n'}}{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}";

fn chat() -> Vec<ChatMessage> {
    vec![
        ChatMessage::new("user", " Hi"),
        ChatMessage::new("assistant", "Hello!"),
        ChatMessage::new("user", "1+1?"),
    ]
}

fn with_system() -> Vec<ChatMessage> {
    [vec![ChatMessage::new("system", "Be brief.")], chat()].concat()
}

fn check(source: &str, messages: &[ChatMessage], add_generation_prompt: bool, expected: &str) {
    let options = ChatOptions { add_generation_prompt, ..ChatOptions::default() };
    assert_eq!(template(source).render(messages, &options).unwrap(), expected);
}

#[test]
fn chatml() {
    let turns = "<|im_start|>user\n Hi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n";
    let default = "<|im_start|>system\nYou are helpful.<|im_end|>\n";
    check(CHATML, &chat(), false, &format!("{default}{turns}"));
    check(
        CHATML,
        &with_system(),
        true,
        &format!("<|im_start|>system\nBe brief.<|im_end|>\n{turns}<|im_start|>assistant\n"),
    );
}

#[test]
fn llama3() {
    check(
        LLAMA3,
        &chat(),
        true,
        "<s><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nHello!<|eot_id|>\
         <|start_header_id|>user<|end_header_id|>\n\n1+1?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    );
}

#[test]
fn mistral() {
    check(MISTRAL, &chat(), true, "<s> [INST]  Hi [/INST] Hello!</s> [INST] 1+1? [/INST]");
    check(
        MISTRAL,
        &with_system(),
        true,
        "<s> [INST] Be brief.\n\n Hi [/INST] Hello!</s> [INST] 1+1? [/INST]",
    );
    let error = template(MISTRAL).render(&chat()[1..], &ChatOptions::default()).unwrap_err();
    let ChatTemplateError::Refused { line, message, .. } = &error else { panic!("{error}") };
    assert_eq!((*line, message.as_str()), (11, "roles must alternate user/assistant"));
    assert_eq!(
        error.to_string(),
        "model: chat template, line 11, refuses the messages: roles must alternate user/assistant"
    );
}

#[test]
fn gemma() {
    check(
        GEMMA,
        &chat(),
        true,
        "<s><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nHello!<end_of_turn>\n\
         <start_of_turn>user\n1+1?<end_of_turn>\n<start_of_turn>model\n",
    );
    let error = template(GEMMA).render(&with_system(), &ChatOptions::default()).unwrap_err();
    assert!(error.to_string().contains("System role not supported"), "{error}");
}

#[test]
fn qwen25_with_tools() {
    let turns = "<|im_start|>user\n Hi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n";
    check(QWEN25, &chat(), false, turns);
    let call = json!({ "role": "assistant", "content": "", "tool_calls": [
        { "function": { "name": "add", "arguments": { "a": 1, "b": [1.5, "<é>"] } } },
    ] });
    let messages = [ChatMessage::new("user", "1+1?"), serde_json::from_value(call).unwrap()];
    let options = ChatOptions { tools: Some(json!([{ "name": "add" }])), ..ChatOptions::default() };
    assert_eq!(
        template(QWEN25).render(&messages, &options).unwrap(),
        "<|im_start|>system\n# Tools\n<tools>\n{\"name\": \"add\"}\n</tools><|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n\
         <|im_start|>assistant\n<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1, \"b\": [1.5, \"<é>\"]}}\n</tool_call><|im_end|>\n"
    );
}

#[test]
fn phi3() {
    let turns = "<|user|>\n Hi<|end|>\n<|assistant|>\nHello!<|end|>\n<|user|>\n1+1?<|end|>\n";
    check(PHI3, &chat(), true, &format!("{turns}<|assistant|>\n"));
    check(PHI3, &with_system(), false, &format!("<|system|>\nBe brief.<|end|>\n{turns}</s>"));
}

/// What `transformers` gives templates beyond Jinja.
#[test]
fn functions_methods_and_tags() {
    check(
        "{{ messages[0].content.strip().upper() }}|{{ messages[0].items() | list | length }}\n",
        &chat(),
        false,
        "HI|2",
    );
    check(
        "{{ messages[0] | tojson(indent=2) }}",
        &chat()[..1],
        false,
        "{\n  \"role\": \"user\",\n  \"content\": \" Hi\"\n}",
    );
    check("{% generation %}\n  a\n{%- endgeneration -%}\n b", &chat(), false, "  ab");
    check(
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
        &chat(),
        false,
        "user",
    );
    check(
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        &chat(),
        false,
        "3",
    );
    check(
        "{{ none }} {{ true }} {{ tools is none }} {{ missing }}{{ tools is iterable }}",
        &chat(),
        false,
        "None True True False",
    );
    check("a\r\n{% if true %}\r\nb\r\n{% endif %}\r\nc\r\n", &chat(), false, "a\nb\nc");
    let options = ChatOptions {
        now: Some(UNIX_EPOCH + Duration::from_secs(1_721_997_296)),
        variables: json!({ "enable_thinking": false }).as_object().cloned().unwrap(),
        ..ChatOptions::default()
    };
    let text =
        template("{{ strftime_now('%d %b %Y') }} {{ enable_thinking }}").render(&chat(), &options).unwrap();
    assert_eq!(text, "26 Jul 2024 False");
}

#[test]
fn tokenizers_bring_their_templates() {
    let fields = GgufTokenizerFields {
        model: "llama".into(),
        tokens: ["<unk>", "<bos>", "<eos>"].map(str::to_owned).to_vec(),
        scores: vec![0.0; 3],
        token_types: vec![2, 3, 3],
        bos: Some(1),
        eos: Some(2),
        ..GgufTokenizerFields::default()
    };
    let none = Tokenizer::from_gguf(&fields, "small.gguf").unwrap();
    assert!(none.chat_template(None).unwrap().is_none());
    let fields = GgufTokenizerFields {
        chat_template: Some("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}".into()),
        named_chat_templates: vec![("rag".into(), "rag".into())],
        ..fields
    };
    let tokenizer = Tokenizer::from_gguf(&fields, "small.gguf").unwrap();
    let render = |template: ChatTemplate| template.render(&chat(), &ChatOptions::default()).unwrap();
    assert_eq!(render(tokenizer.chat_template(None).unwrap().unwrap()), "<bos> Hi<eos>");
    assert_eq!(render(tokenizer.chat_template(Some("rag")).unwrap().unwrap()), "rag");
    let error = tokenizer.chat_template(Some("tools")).unwrap_err().to_string();
    assert_eq!(error, "small.gguf: there is no chat template \"tools\"; there are default, rag");
    assert!(ChatTemplate::new("{{ bos_token }}", special_tokens(), "x").is_ok());
}
