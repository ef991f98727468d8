//! Pages hold what the plan says, to the byte; they are whole HTML; what comes from files never becomes markup.

use plimsoll_model::{ModelSpec, catalogue};
use plimsoll_plan::config::RawConfig;
use plimsoll_plan::{Machine, ProcessLimits, Rates, TrainingPlan};
use plimsoll_report::{Document, ParetoPoint, RunRecord, RunState, Subject, WaterfallEntry};
use plimsoll_train::{MemoryHealth, MemoryMetrics, StepMetrics};
use serde_json::{Value, json};

const HOSTILE: &str = "</script><img src=x onerror=alert(1)>\" ' & {{ 1 + 1 }} <!--";

fn machine() -> Machine {
    Machine {
        rates: Rates::of_cpu([1e11, 1e11], 1e10, 1e9),
        limits: ProcessLimits::NONE,
        overhead_bytes: 50 << 20,
        host_bytes_per_token: 32,
        worker_bytes: 0,
        disk_available: Some(1 << 40),
        disk_reserved: 0,
        device_bytes: None,
        host_bytes: None,
    }
}

fn small() -> ModelSpec {
    ModelSpec { num_layers: 3, vocab_size: 2048, ..catalogue::find("smollm2-135m").unwrap() }
}

fn plan(spec: &ModelSpec, set: &[&str]) -> TrainingPlan {
    let text = "model: {path: smollm2-135m}\ndata: {sequence_length: 64, train: t.txt}\nmemory: {device_budget: 100000GiB}\ntraining: {batch_size: 1, mixed_precision: f32}";
    let mut config = RawConfig::from_str(text, "test").unwrap();
    set.iter().for_each(|assignment| config.apply_set(assignment).unwrap());
    TrainingPlan::new(&config, spec, &machine()).unwrap()
}

fn page_of(plan: &TrainingPlan) -> String {
    let subject = Subject { name: "c.yaml".to_owned(), plan: Some(plan), ..Subject::default() };
    Document::of(subject).unwrap().to_html().unwrap()
}

/// A page: what stands in style and scripts apart, and the rest as XML. That is stricter than a browser: each element ends, and no
/// character of a text is markup.
struct Html {
    style: String,
    data: String,
    script: String,
    rest: String,
}

impl Html {
    fn tree(&self) -> roxmltree::Document<'_> {
        let options = roxmltree::ParsingOptions { allow_dtd: true, ..Default::default() };
        roxmltree::Document::parse_with_options(&self.rest, options).unwrap()
    }

    /// The elements of a name and a class.
    fn all(&self, selector: &str) -> Vec<String> {
        let (name, class) = selector.split_once('.').unwrap_or((selector, ""));
        let tree = self.tree();
        let has_class = |node: &roxmltree::Node<'_, '_>| {
            class.is_empty()
                || node.attribute("class").is_some_and(|own| own.split(' ').any(|one| one == class))
        };
        let found = tree.descendants().filter(|node| node.has_tag_name_of(name) && has_class(node));
        found
            .map(|node| node.descendants().filter_map(|own| own.text().filter(|_| own.is_text())).collect())
            .collect()
    }
}

trait Named {
    fn has_tag_name_of(&self, name: &str) -> bool;
}

impl Named for roxmltree::Node<'_, '_> {
    fn has_tag_name_of(&self, name: &str) -> bool {
        self.is_element() && (name.is_empty() || self.tag_name().name() == name)
    }
}

fn parsed(page: &str) -> Html {
    // Within a script, only its end counts.
    assert_eq!((page.matches("<script").count(), page.matches("</script").count()), (2, 2));
    assert!(page.starts_with("<!DOCTYPE html>\n<html lang=") && !page.contains("<!--"));
    let mut rest = page.to_owned();
    let mut cut = |begin: &str, end: &str| {
        let from = rest.find(begin).unwrap() + begin.len();
        let to = from + rest[from..].find(end).unwrap();
        let inside = rest[from..to].to_owned();
        rest.replace_range(from..to, "");
        inside
    };
    let style = cut("<style>", "</style>");
    let data = cut("<script type=\"application/json\" id=\"data\">", "</script>");
    let script = cut("<script>", "</script>");
    let html = Html { style, data, script, rest };
    let tree = html.tree();
    let known = |node: roxmltree::Node<'_, '_>| {
        let name = node.tag_name().name();
        assert!(
            !["img", "iframe", "object", "link", "embed", "base", "form", "foreignObject"].contains(&name),
            "{name}"
        );
        for attribute in node.attributes() {
            let (name, value) = (attribute.name(), attribute.value());
            assert!(!name.starts_with("on") && !["style", "src", "href"].contains(&name), "{name}");
            assert!(
                !value.contains("NaN") && !value.contains("inf") || name == "aria-label",
                "{name}: {value}"
            );
        }
    };
    tree.descendants().filter(|node| node.is_element()).for_each(known);
    html
}

fn all(html: &Html, selector: &str) -> Vec<String> {
    html.all(selector)
}

fn text(html: &Html, selector: &str) -> String {
    all(html, selector).into_iter().next().unwrap_or_else(|| panic!("no {selector}"))
}

/// The values of an attribute of all elements of a name and a class.
fn attributes(html: &Html, name: &str, class: &str, attribute: &str) -> Vec<String> {
    let tree = html.tree();
    let found = tree.descendants().filter(|node| {
        node.has_tag_name_of(name)
            && node.attribute("class").is_some_and(|own| own.split(' ').any(|one| one == class))
    });
    found.filter_map(|node| node.attribute(attribute).map(str::to_owned)).collect()
}

fn data(html: &Html) -> Value {
    assert!(!html.data.contains('<'));
    serde_json::from_str(&html.data).unwrap()
}

fn numbers(value: &Value) -> Vec<u64> {
    value.as_array().unwrap().iter().map(|number| number.as_u64().unwrap()).collect()
}

const AWAY: &str = "memory.offload={optimizer: disk, gradients: host, activations: host, parameters: disk}";

#[test]
fn what_lives_at_the_peak_of_a_page_is_the_peak_of_the_plan() {
    let settings: [&[&str]; 4] = [
        &["training.gradient_accumulation_steps=1"],
        &["training.gradient_accumulation_steps=64", "training.gradient_checkpointing=full"],
        &[AWAY, "training.gradient_checkpointing=full"],
        &["training.optimizer_in_backward=true", "training.gradient_accumulation_steps=1"],
    ];
    for set in settings {
        let plan = plan(&small(), set);
        let html = parsed(&page_of(&plan));
        let timeline = &data(&html)["timeline"];
        let peaks = [plan.peak_bytes(), plan.choice.dry_run.host_bytes(), plan.disk_bytes()];
        let peaks: Vec<u64> = peaks.into_iter().filter(|bytes| *bytes > 0).collect();
        let tiers = timeline["tiers"].as_array().unwrap();
        assert_eq!(tiers.iter().map(|tier| tier["peak_bytes"].as_u64().unwrap()).collect::<Vec<_>>(), peaks);
        let device = &tiers[0];
        let column = device["peak_column"].as_u64().unwrap() as usize;
        assert_eq!(numbers(&device["top"])[column], plan.peak_bytes(), "{set:?}");
        // No allocation of so small a step is left out.
        let own = &device["allocations"];
        let (first, last, bytes, tag) =
            (numbers(&own["first"]), numbers(&own["last"]), numbers(&own["bytes"]), numbers(&own["tag"]));
        let lives_in = |column: usize, index: usize| (first[index]..=last[index]).contains(&(column as u64));
        let columns = timeline["begins"].as_array().unwrap().len();
        for column in 0..columns {
            for series in device["live"].as_array().unwrap() {
                let of_tag =
                    |index: &usize| lives_in(column, *index) && tag[*index] == series[0].as_u64().unwrap();
                let live: u64 = (0..bytes.len()).filter(of_tag).map(|index| bytes[index]).sum();
                assert_eq!(live, numbers(&series[1])[column], "{set:?}, column {column}");
            }
        }
        let live: u64 =
            (0..bytes.len()).filter(|index| lives_in(column, *index)).map(|index| bytes[index]).sum();
        let gaps = plan.peak_bytes() - live;
        if timeline["part"] == "a step" {
            assert_eq!(
                (live, gaps),
                (plan.at_peak().total(), plan.choice.dry_run.at_peak().gaps()),
                "{set:?}"
            );
        }
        // The breakdown has the same bytes, with what is outside of the arena.
        let sum: u64 = Document::of(Subject { plan: Some(&plan), ..Subject::default() }).unwrap().memory[0]
            .parts
            .iter()
            .map(|part| part.bytes)
            .sum();
        assert_eq!(sum, plan.bytes_under_the_line());
        // The line begins where nothing or the weights are, and a mark says where the peak is.
        assert!(text(&html, "text.peak-words").starts_with("peak "));
        assert_eq!(all(&html, "figure.tier").len(), tiers.len());
    }
}

/// Iterations that are alike take the time that they take, and little room.
#[test]
fn counted_iterations_are_a_narrow_stretch() {
    let plan = plan(&small(), &["training.gradient_accumulation_steps=64"]);
    let html = parsed(&page_of(&plan));
    let timeline = &data(&html)["timeline"];
    let gap = &timeline["breaks"][0];
    assert!(gap["to"].as_f64().unwrap() - gap["from"].as_f64().unwrap() < 0.1, "{gap}");
    assert!(gap["length"].as_f64().unwrap() > 0.8 * timeline["length"].as_f64().unwrap(), "{gap}");
    assert!(text(&html, "text.break-words").starts_with("× 6"));
    let begins: Vec<f64> =
        timeline["begins"].as_array().unwrap().iter().map(|begin| begin.as_f64().unwrap()).collect();
    assert!(begins.windows(2).all(|pair| pair[0] < pair[1]));
}

/// A large model with much to show: its page stays small, and its peak exact.
#[test]
fn pages_of_large_models_are_small() {
    let spec = catalogue::find("llama-3.1-70b").unwrap();
    let set = ["training.gradient_checkpointing=none", "training.loss_chunk_tokens=16"];
    let plan = plan(&spec, &set);
    let page = page_of(&plan);
    assert!(page.len() < 2 << 20, "{} bytes", page.len());
    let data = data(&parsed(&page));
    let device = &data["timeline"]["tiers"][0];
    let column = device["peak_column"].as_u64().unwrap() as usize;
    assert_eq!(numbers(&device["top"])[column], plan.peak_bytes());
    let live: u64 = device["live"].as_array().unwrap().iter().map(|series| numbers(&series[1])[column]).sum();
    assert_eq!(live, plan.at_peak().total());
}

fn step(step: u64) -> StepMetrics {
    let memory = MemoryMetrics {
        device_peak_bytes: 1 << 20,
        host_peak_bytes: 0,
        disk_bytes: 0,
        process_rss_bytes: 2 << 20,
        health: MemoryHealth::default(),
    };
    StepMetrics {
        step,
        loss: 5.0 / step as f64,
        grad_norm: 1.0,
        skipped: false,
        loss_scale: None,
        lr: 1e-3,
        tokens: 128 * step,
        tokens_per_second: 1000.0,
        batch_size: 2,
        memory,
        rung: 0,
        micro_batch_size: 1,
        validation_loss: (step == 2).then_some(3.5),
        io: None,
        ranks_rss_bytes: Vec::new(),
        experts: Vec::new(),
        expert_reads: None,
    }
}

#[test]
fn what_comes_from_files_is_no_markup() {
    let spec = ModelSpec { name: HOSTILE.to_owned(), ..small() };
    let mut plan = plan(&spec, &["training.gradient_accumulation_steps=1"]);
    plan.config.apply_set(&format!("data.train={}", json!(HOSTILE))).unwrap();
    let run = RunRecord {
        configuration: Some(HOSTILE.to_owned()),
        steps: (1..=3).map(step).collect(),
        report: None,
        ended: None,
    };
    let subject = || Subject {
        name: HOSTILE.to_owned(),
        place: HOSTILE.to_owned(),
        run: Some(&run),
        waterfall: vec![WaterfallEntry {
            change: HOSTILE.to_owned(),
            bytes_saved: -5,
            seconds_added: -0.5,
            device_peak_bytes: 5,
        }],
        pareto: [1u64, 2]
            .map(|n| ParetoPoint {
                device_peak_bytes: n,
                step_seconds: n as f64,
                quality: HOSTILE.to_owned(),
                config: json!({"a": n, HOSTILE: n}),
            })
            .to_vec(),
        notes: vec![HOSTILE.to_owned()],
        plan: None,
    };
    for plan in [None, Some(&plan)] {
        let page = Document::of(Subject { plan, ..subject() }).unwrap().to_html().unwrap();
        let html = parsed(&page);
        for place in ["h1", "title", "p.note", "p.headline", "th", "td", "code", "pre"] {
            let said = all(&html, place).concat();
            // A run without a plan has no place to be fast at.
            assert!(said.contains(HOSTILE) || place == "p.headline", "{place}: {said}");
        }
        data(&html);
    }
}

/// The policy names the hashes of just the style and the script that are there.
#[test]
fn the_policy_lets_nothing_else_in() {
    use base64::Engine;
    use base64::prelude::BASE64_STANDARD;
    use sha2::{Digest, Sha256};
    let html = parsed(&page_of(&plan(&small(), &["training.gradient_accumulation_steps=1"])));
    let tree = html.tree();
    let policy = tree.descendants().find(|node| node.attribute("http-equiv").is_some()).unwrap();
    let policy = policy.attribute("content").unwrap();
    assert!(policy.starts_with("default-src 'none';") && !policy.contains("unsafe"), "{policy}");
    for (directive, content) in [("style-src", &html.style), ("script-src", &html.script)] {
        let hash = BASE64_STANDARD.encode(Sha256::digest(content));
        assert!(policy.contains(&format!("{directive} 'sha256-{hash}'")), "{policy}");
    }
}

#[test]
fn runs_are_shown_as_far_as_they_have_come() {
    let document = |steps: Vec<StepMetrics>| {
        let run = RunRecord { steps, ..RunRecord::default() };
        Document::of(Subject { name: "out".to_owned(), run: Some(&run), ..Subject::default() }).unwrap()
    };
    let ended = Some("step 2: the loss is NaN".to_owned());
    let run = RunRecord { steps: vec![step(1)], ended, ..RunRecord::default() };
    let failed = Document::of(Subject { run: Some(&run), ..Subject::default() }).unwrap();
    assert_eq!(failed.run.as_ref().unwrap().state, RunState::Ended);
    assert_eq!(failed.headline, "Ended after a step: step 2: the loss is NaN.");
    let at_once = RunRecord { steps: Vec::new(), ..run };
    let failed = Document::of(Subject { run: Some(&at_once), ..Subject::default() }).unwrap();
    assert_eq!(failed.headline, "Ended before its first step: step 2: the loss is NaN.");
    failed.to_html().unwrap();
    let none = document(Vec::new());
    assert_eq!(none.run.as_ref().unwrap().state, RunState::Empty);
    assert!(text(&parsed(&none.to_html().unwrap()), "p.headline").contains("No step"));
    let one = parsed(&document(vec![step(1)]).to_html().unwrap());
    assert_eq!(all(&one, "figure.curve").len(), 3);
    assert_eq!(all(&one, "circle.dot").len(), 3);
    let bad = StepMetrics { loss: f64::NAN, ..step(4) };
    let open = document(vec![step(1), step(2), step(3), bad, step(5)]);
    let page = parsed(&open.to_html().unwrap());
    assert!(
        open.headline.contains("5 steps so far") && open.headline.contains("loss 5.000 to 1.000"),
        "{}",
        open.headline
    );
    // The curve goes on behind the step that is no number.
    let path = attributes(&page, "path", "curve", "d").remove(0);
    assert_eq!(path.matches('M').count(), 2, "{path}");
    assert!(data(&page)["run"]["buckets"][3]["loss"].is_null());
    let measured = open.compared.iter().map(|row| row.measured).collect::<Vec<_>>();
    assert_eq!(measured, [f64::from(1 << 20), f64::from(2 << 20), 0.128, 1000.0]);
}

#[test]
fn a_plan_that_does_not_fit_says_so() {
    let set = [
        "memory.disk_budget=1MiB",
        "training.batch_size=64",
        "training.gradient_checkpointing=none",
        "training.gradient_accumulation_steps=1",
    ];
    let needed = plan(&small(), &set).bytes_under_the_line();
    let budget = format!("memory.device_budget={}", needed - needed / 20);
    let plan = plan(&small(), &[&set[..], &[&budget]].concat());
    assert!(!plan.fits());
    let document = Document::of(Subject { plan: Some(&plan), ..Subject::default() }).unwrap();
    assert!(
        document.headline.starts_with("Does not fit: ") && document.headline.contains("short"),
        "{}",
        document.headline
    );
    let html = parsed(&document.to_html().unwrap());
    assert_eq!(all(&html, "ul.misfits").len(), 1);
    assert!(!all(&html, "line.line").is_empty());
}

#[test]
fn other_settings_are_listed_with_what_they_take() {
    let spec = catalogue::find("smollm2-135m").unwrap();
    let plan =
        plan(&spec, &["data.sequence_length=512", "training.batch_size=4", "memory.device_budget=8GiB"]);
    let document = Document::of(Subject { plan: Some(&plan), ..Subject::default() }).unwrap();
    assert!(!document.alternatives.is_empty() && document.alternatives.iter().all(|other| other.fits));
    assert!(document.alternatives.windows(2).all(|pair| pair[0].peak_bytes <= pair[1].peak_bytes));
    let html = parsed(&document.to_html().unwrap());
    let (said, keys) = (all(&html, "th").concat(), all(&html, "code").concat());
    for other in &document.alternatives {
        assert!(
            said.contains(&other.what) && other.change.iter().all(|key| keys.contains(key)),
            "{said} {keys}"
        );
    }
}
