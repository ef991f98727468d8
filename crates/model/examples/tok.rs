fn main(){ let f=plimsoll_model::ModelFiles::open(std::path::Path::new("/work/data/SmolLM2-135M-Instruct.Q4_1.gguf")).unwrap(); println!("{:?}",f.spec());
 let rss=||std::fs::read_to_string("/proc/self/status").unwrap().lines().filter(|l|l.starts_with("VmRSS")||l.starts_with("VmHWM")||l.starts_with("RssAnon")).map(|s|s.to_string()).collect::<Vec<_>>().join(" ");
 println!("{}",rss()); let t0=std::time::Instant::now(); let t=f.tokenizer().unwrap(); println!("{} {:?}",rss(),t0.elapsed());
 let j:serde_json::Value=serde_json::from_slice(&std::fs::read("/work/shared/reference/smollm2.json").unwrap()).unwrap();
 for c in j["tokenizer_cases"].as_array().unwrap(){ let want:Vec<u32>=c["ids"].as_array().unwrap().iter().map(|v|v.as_u64().unwrap() as u32).collect(); let got=t.encode(c["text"].as_str().unwrap()).unwrap(); if want!=got {println!("BAD {:?} {:?} {:?}",c["text"],want,got);} }
 let want:Vec<u32>=j["token_ids"].as_array().unwrap().iter().map(|v|v.as_u64().unwrap() as u32).collect(); let got=t.encode(j["text"].as_str().unwrap()).unwrap(); println!("text {}",want==got);
 let s=std::fs::read_to_string("/work/data/tinyshakespeare.txt").unwrap(); let t0=std::time::Instant::now(); println!("{} {:?} {}",t.encode(&s).unwrap().len(),t0.elapsed(),rss());
 let t0=std::time::Instant::now(); let mut buf=vec![0u8;200<<20]; for p in f.spec().parameters(){ f.weights().read_into(&p,plimsoll_device::DType::F32,&mut buf[..p.elements() as usize*4]).unwrap(); } println!("read {:?} {}",t0.elapsed(),rss());
}
