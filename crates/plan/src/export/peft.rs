//! PEFT's `adapter_config.json`.

use plimsoll_model::adapter::AdapterStart;
use serde_json::Value;

use super::ExportError;
use super::sheet::{Page, Sheet, whole};

pub(super) fn document(sheet: &mut Sheet<'_>) -> Result<Page, ExportError> {
    sheet.head("Save as adapter_config.json: LoraConfig.from_pretrained(FOLDER), then get_peft_model(model, config).");
    let mut page = adapter(sheet)?;
    if let Ok(path) = sheet.model_path("") {
        page.put("base_model_name_or_path", path);
    }
    let ratio = sheet.training().lora.loraplus_lr_ratio();
    if ratio != 1.0 {
        sheet.note(
            "training.lora.loraplus_lr_ratio",
            "peft.optimizers.create_loraplus_optimizer makes such an optimizer.",
        );
    }
    if sheet.adapters().is_some_and(|adapters| !adapters.weight_types.is_empty()) {
        sheet.say("training.quantization: `plimsoll export bitsandbytes` has the storage of frozen weights.");
    }
    Ok(page)
}

/// The adapter's own keys.
fn adapter(sheet: &mut Sheet<'_>) -> Result<Page, ExportError> {
    let config = sheet.adapter_config()?;
    let mut page = Page::default();
    if let Value::Object(map) = config.to_json() {
        page.0 = map;
    }
    page.put("inference_mode", false);
    page.put("lora_alpha", whole(config.alpha));
    page.put(
        "init_lora_weights",
        match config.start {
            AdapterStart::Kaiming => Value::Bool(true),
            AdapterStart::Gaussian => Value::from("gaussian"),
            AdapterStart::Pissa { power_iterations: None } => Value::from("pissa"),
            AdapterStart::Pissa { power_iterations: Some(count) } => {
                Value::from(format!("pissa_niter_{count}"))
            }
        },
    );
    Ok(page)
}
