//! `plimsoll convert`: a model in another format or type, a few rows at a time.

use std::io;
use std::ops::Range;
use std::path::Path;

use plimsoll_device::DType;
use plimsoll_device::cpu::quantize::can_quantize;
use plimsoll_device::cpu::quantize::four_bit::FourBit;
use plimsoll_memory::ByteSize;
use plimsoll_model::gguf::ggml_type;
use plimsoll_model::hf_config::CONFIG_NAME;
use plimsoll_model::save::UNFINISHED;
use plimsoll_model::{
    ModelError, ModelFiles, ModelSpec, Parameter, RowSource, SaveError, Target, Transcoder, TypesByGroup,
    Upcycled, WeightGroup,
};
use plimsoll_train::{LOCK, OutputFolder, StopFlag};
use serde_json::json;

use crate::args::{ConvertArgs, OutputArgs};
use crate::by_group::types_by_group;
use crate::failure::Failure;
use crate::models;
use crate::output::{Place, errln, outln};
use crate::progress;
use crate::signals::StopSignals;

/// A folder in smaller files has one for each tensor, and no use of it.
const LEAST_SHARD: ByteSize = ByteSize(1 << 20);

/// Of the first values of routers, which are the same each time.
const ROUTER_SEED: u64 = 0;

pub fn run(args: &ConvertArgs) -> Result<(), Failure> {
    let files = models::with_weights(&args.model, "convert", args.output.json)?;
    match args.upcycle {
        None => write(&files, files.spec(), files.weights(), &args.output, Vec::new()),
        Some(experts) => {
            let upcycled = Upcycled::new(files.spec(), files.weights(), experts, ROUTER_SEED)
                .map_err(|error| Failure::usage(format!("--upcycle {experts}: {error}")))?;
            write(&files, upcycled.spec(), &upcycled, &args.output, Vec::new())
        }
    }
}

/// What `--output` and `--dtype` ask for together, and the groups whose linears are packed where not all are.
fn target(args: &OutputArgs, spec: &ModelSpec) -> Result<(Target, Option<Vec<WeightGroup>>), Failure> {
    let gguf = args.output.extension().is_some_and(|extension| extension == "gguf");
    let types = types_by_group("--dtype", &args.dtype, spec, |name| {
        let dtype = DType::ALL.into_iter().find(|dtype| dtype.name() == name);
        let held = |dtype: &DType| if gguf { in_gguf(*dtype) } else { in_folder(*dtype) };
        dtype.filter(held).ok_or_else(|| {
            "a GGUF file holds f32, bf16, f16, q8_0, q5_0, q5_1, q4_0, q4_1, q4_k, q6_k or mxfp4; a folder f32, bf16, \
             f16, nf4, nf4_f32, fp4, fp4_f32, int8 or mxfp4"
                .to_owned()
        })
    })?;
    let fail = |reason: String| Failure::usage(format!("--dtype {}: {reason}", args.dtype));
    if gguf {
        return match types.of_group(WeightGroup::Router) {
            Some(dtype) if dtype != DType::F32 && types.named().any(|(g, _)| g == WeightGroup::Router) => {
                Err(fail(format!("a GGUF file has its routers in f32, not in {dtype}; leave router out")))
            }
            _ => Ok((Target::Gguf(types), None)),
        };
    }
    folder_target(&types, spec).map_err(fail)
}

fn in_gguf(dtype: DType) -> bool {
    ggml_type(dtype).is_some() && (dtype.is_float() || can_quantize(dtype))
}

fn in_folder(dtype: DType) -> bool {
    dtype.is_float() || matches!(dtype, DType::Int8 | DType::Mxfp4) || FourBit::of(dtype).is_some()
}

/// A folder is read by transformers in one type, and packed by one method; what is packed may be some of the groups.
fn folder_target(
    types: &TypesByGroup,
    spec: &ModelSpec,
) -> Result<(Target, Option<Vec<WeightGroup>>), String> {
    let packs = |dtype: &DType| !dtype.is_float();
    let packed: Vec<DType> =
        types.named().map(|(_, dtype)| dtype).chain(types.rest()).filter(packs).collect();
    let Some(dtype) = packed.first().copied() else {
        let rest = types.rest().unwrap_or(DType::Bf16);
        return match types.named().find(|(_, dtype)| *dtype != rest) {
            Some((group, dtype)) => Err(format!(
                "transformers reads a folder in one type, so that {} cannot be {dtype} beside {rest}; a GGUF file can hold it",
                group.name()
            )),
            None => Ok((Target::HuggingFace(rest), None)),
        };
    };
    if let Some(other) = packed.iter().find(|other| **other != dtype) {
        return Err(format!(
            "a folder is packed in one way, not in {dtype} and {other}; a GGUF file can hold two"
        ));
    }
    let floats = types.named().map(|(_, dtype)| dtype).chain(types.rest());
    if let Some(other) = floats.filter(|dtype: &DType| dtype.is_float()).find(|other| *other != DType::Bf16) {
        return Err(format!("what is not packed in a folder is bf16, not {other}"));
    }
    let is_linear = |group: &WeightGroup| WeightGroup::LINEARS.contains(group);
    let unpacked = types.named().find(|(group, dtype)| packs(dtype) && !is_linear(group));
    if let Some((group, dtype)) = unpacked {
        return Err(format!("{} is not packed in a folder: it is bf16, not {dtype}", group.name()));
    }
    let can_pack = |group: &WeightGroup| match dtype {
        DType::Mxfp4 => *group == WeightGroup::Experts,
        _ => is_linear(group),
    };
    if let Some((group, _)) = types.named().find(|(group, own)| packs(own) && !can_pack(group)) {
        return Err(format!("a folder has experts in mxfp4, not {}", group.name()));
    }
    let mut groups = WeightGroup::in_model(spec);
    groups.retain(can_pack);
    let has_any = !groups.is_empty();
    groups.retain(|group| types.of_group(*group) == Some(dtype));
    if has_any && groups.is_empty() {
        return Err(format!(
            "no group of this model's linears would be packed in {dtype}: each has another type by name; \
             leave {dtype} away, or one of the names"
        ));
    }
    Ok(match (dtype, FourBit::of(dtype)) {
        (DType::Mxfp4, _) => (Target::Mxfp4, None),
        (_, Some(kind)) => (Target::FourBit { kind, doubly: !dtype.has_rows() }, Some(groups)),
        (_, None) => (Target::EightBit, Some(groups)),
    })
}

/// A source that gives no more once a stop is wished for, so that what was begun is taken back.
struct Stoppable<'a> {
    source: &'a dyn RowSource,
    stop: &'a StopFlag,
}

impl Stoppable<'_> {
    fn go_on(&self) -> Result<(), ModelError> {
        match self.stop.is_raised() {
            true => {
                Err(ModelError::Io { path: "the weights".into(), source: io::ErrorKind::Interrupted.into() })
            }
            false => Ok(()),
        }
    }
}

impl RowSource for Stoppable<'_> {
    fn rows(&self, parameter: &Parameter, rows: Range<u64>, out: &mut [f32]) -> Result<(), ModelError> {
        self.go_on()?;
        self.source.rows(parameter, rows, out)
    }

    fn blocks(
        &self,
        parameter: &Parameter,
        rows: Range<u64>,
        dtype: DType,
        out: &mut [u8],
    ) -> Result<bool, ModelError> {
        self.go_on()?;
        self.source.blocks(parameter, rows, dtype, out)
    }
}

/// Writes a model of that shape with the values of `source`, and the tokenizer of `files`. `notes` are what is to be said of it.
pub fn write(
    files: &ModelFiles,
    spec: &ModelSpec,
    source: &dyn RowSource,
    args: &OutputArgs,
    mut notes: Vec<String>,
) -> Result<(), Failure> {
    let (target, packed) = target(args, spec)?;
    if args.output.exists() && !args.force {
        return Err(Failure::usage(format!(
            "{} is there already; choose another --output, or --force to replace it",
            args.output.display()
        )));
    }
    match (args.max_shard_size, &target) {
        (Some(_), Target::Gguf(_)) => {
            return Err(Failure::usage("--max-shard-size is about a folder's files, and a GGUF is one file"));
        }
        (Some(size), _) if size < LEAST_SHARD => {
            return Err(Failure::usage(format!("--max-shard-size is {size}; give at least {LEAST_SHARD}")));
        }
        _ => {}
    }
    let Place::File(output) = Place::of(&args.output) else {
        return Err(Failure::usage(format!(
            "{} is no file, and none can be put there",
            args.output.display()
        )));
    };
    // Nothing is written into the folder of a run that is under way.
    let _folder = args.output.is_dir().then(|| OutputFolder::take(&args.output)).transpose()?;
    if args.output.is_dir() && !may_be_replaced(&args.output) {
        return Err(Failure::usage(format!(
            "{} holds something else than a model, so that --force does not write into it; choose another --output",
            args.output.display()
        )));
    }
    let total: u64 = spec.parameters().iter().map(Parameter::elements).sum();
    let bar = progress::counter(total / 1_000_000, "million parameters", args.json);
    let mut show = |done: u64, _: u64| bar.set_position(done / 1_000_000);
    let signals = StopSignals::listen(false)?;
    let source = Stoppable { source, stop: signals.flag() };
    let mut writer = Transcoder::new(spec, &source, &mut show);
    if let Some(groups) = packed {
        writer = writer.packing(&groups);
    }
    if let Some(size) = args.max_shard_size {
        writer = writer.shard_bytes(size.0);
    }
    let failed = |error: SaveError| match signals.flag().is_raised() {
        true => {
            errln!("stopped: nothing was written to {}", args.output.display());
            Failure::stopped(signals.exit_code())
        }
        false => error.into(),
    };
    let bytes = match target {
        Target::Gguf(types) => {
            let tokenizer = unless_missing(files.tokenizer_fields(), &mut notes)?;
            let bytes = writer.write_gguf(&output, types, tokenizer.as_ref()).map_err(failed)?;
            notes.extend(writer.substitutes().iter().map(ToString::to_string));
            bytes
        }
        _ => {
            let tokenizer = unless_missing(files.tokenizer(), &mut notes)?;
            writer.with_tokenizer(tokenizer.as_ref()).write_folder(&output, target).map_err(failed)?
        }
    };
    bar.finish_and_clear();
    if args.json {
        let document = json!({
            "output": args.output, "dtype": args.dtype, "bytes": bytes, "parameters": total, "notes": notes,
        });
        outln!("{document}")?;
    } else {
        for note in notes {
            outln!("note: {note}")?;
        }
        let bits = bytes as f64 * 8.0 / total.max(1) as f64;
        outln!(
            "{}: {} ({bits:.2} bits a parameter)",
            args.output.display(),
            plimsoll_memory::ByteSize(bytes)
        )?;
    }
    Ok(())
}

/// Whether a folder is empty, or a model is in it or was.
fn may_be_replaced(folder: &Path) -> bool {
    let Ok(entries) = std::fs::read_dir(folder) else { return false };
    let names = entries.flatten().map(|entry| entry.file_name());
    let mut names = names.filter(|name| name != LOCK).peekable();
    let of_model = |name: &std::ffi::OsString| {
        name == CONFIG_NAME
            || name.to_string_lossy().starts_with(UNFINISHED)
            || Path::new(name).extension().is_some_and(|ending| ending == "safetensors")
    };
    names.peek().is_none() || names.any(|name| of_model(&name))
}

/// A tokenizer that is not there is left out with a note; one that is there is carried over or refused.
fn unless_missing<T>(
    tokenizer: Result<T, ModelError>,
    notes: &mut Vec<String>,
) -> Result<Option<T>, Failure> {
    match tokenizer {
        Ok(tokenizer) => Ok(Some(tokenizer)),
        Err(error) if error.is_missing_tokenizer() => {
            notes.push(format!("the tokenizer is left out: {error}"));
            Ok(None)
        }
        Err(error) => Err(error.into()),
    }
}
