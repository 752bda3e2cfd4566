//! A graph without weights and a checkpoint's weights, put together (see `fixtures/onnx/make_onnx.py`).

use std::path::Path;

use half::f16;
use onnx_ir::{Message, ModelProto, TensorProto};

/// Reads a graph, and puts the weights that it names into it.
pub fn model(graph: &Path, checkpoint: &Path) -> ModelProto {
    let mut model = ModelProto::parse_from_bytes(&std::fs::read(graph).unwrap()).unwrap();
    let weights = std::fs::read(checkpoint).unwrap();
    for tensor in &mut model.graph.as_mut().unwrap().initializer {
        if !tensor.external_data.is_empty() {
            fill(tensor, &weights);
        }
    }
    model
}

fn get<'a>(tensor: &'a TensorProto, key: &str) -> Option<&'a str> {
    tensor.external_data.iter().find(|e| e.key == key).map(|e| e.value.as_str())
}

fn fill(tensor: &mut TensorProto, weights: &[u8]) {
    let number = |key: &str| get(tensor, key).unwrap().parse::<usize>().unwrap();
    let stored = &weights[number("offset")..][..number("length")];
    let mut elements: Vec<[u8; 4]> = stored.as_chunks::<4>().0.to_vec();
    if get(tensor, "transposed").is_some() {
        let [rows, columns] = [tensor.dims[0] as usize, tensor.dims[1] as usize];
        elements = (0..rows * columns).map(|i| elements[i % columns * rows + i / columns]).collect();
    }
    tensor.raw_data = match tensor.data_type {
        1 => elements.into_flattened().into(),
        10 => elements
            .into_iter()
            .flat_map(|b| f16::from_f32(f32::from_le_bytes(b)).to_le_bytes())
            .collect::<Vec<_>>()
            .into(),
        other => panic!("unexpected type {other}"),
    };
    tensor.external_data.clear();
    tensor.data_location = Default::default();
}
