mod common;
use common::*;
#[test]
fn look() {
    let runs = [diagnosed("smollm2", SMALL)];
    std::fs::create_dir_all("/tmp/look").unwrap();
    std::fs::write("/tmp/look/one.html", headq_report::html(&runs, "headq report runs/smollm2 --out one.html"))
        .unwrap();
    std::fs::write("/tmp/look/one.md", headq_report::markdown(&runs, "headq report runs/smollm2 --out one.html"))
        .unwrap();
    let runs: Vec<_> = ["gpt2", "pythia-160m", "pythia-410m", "qwen2-0.5b", "tinyllama-1.1b"]
        .iter()
        .map(|n| diagnosed(n, SMALL))
        .chain([diagnosed("mistral-7b", LARGE)])
        .collect();
    std::fs::write("/tmp/look/six.html", headq_report::html(&runs, "headq report runs/* --out six.html")).unwrap();
    std::fs::write("/tmp/look/six.md", headq_report::markdown(&runs, "headq report runs/* --out six.html")).unwrap();
    let runs = [evaluated()];
    std::fs::write("/tmp/look/eval.html", headq_report::html(&runs, "headq report runs/evaluated --out eval.html"))
        .unwrap();
    let runs = [diagnosed("large", LARGE)];
    std::fs::write("/tmp/look/large.html", headq_report::html(&runs, "headq report runs/large --out large.html"))
        .unwrap();
    let runs = [diagnosed("least", LEAST)];
    std::fs::write("/tmp/look/least.html", headq_report::html(&runs, "headq report runs/least --out large.html"))
        .unwrap();
}
