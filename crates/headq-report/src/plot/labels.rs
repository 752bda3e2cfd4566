//! Numbers beside points, none on top of another.

/// A rectangle: left, top, right, bottom.
type Rect = [i32; 4];

fn overlap(a: &Rect, b: &Rect) -> bool {
    a[0] < b[2] && b[0] < a[2] && a[1] < b[3] && b[1] < a[3]
}

fn around(center: (i32, i32), half: (i32, i32)) -> Rect {
    [center.0 - half.0, center.1 - half.1, center.0 + half.0, center.1 + half.1]
}

/// Directions in which a label is tried, the best first; in units of the distance.
const DIRECTIONS: [(f64, f64); 12] = [
    (1.0, -0.6),
    (1.0, 0.6),
    (-1.0, -0.6),
    (-1.0, 0.6),
    (0.0, -1.0),
    (0.0, 1.0),
    (1.0, 0.0),
    (-1.0, 0.0),
    (0.6, -1.0),
    (-0.6, -1.0),
    (0.6, 1.0),
    (-0.6, 1.0),
];

/// Distances that are tried, in multiples of the nearest.
const DISTANCES: [f64; 5] = [1.0, 1.5, 2.1, 2.8, 3.6];

/// Where the center of each label goes, such that it overlaps no other label and no marker and stays inside `bounds`; none where no
/// such place is near. `half_sizes` are half the widths and heights of the labels, `radius` that of the markers.
pub fn place(points: &[(i32, i32)], half_sizes: &[(i32, i32)], radius: i32, bounds: Rect) -> Vec<Option<(i32, i32)>> {
    let mut taken: Vec<Rect> = points.iter().map(|point| around(*point, (radius, radius))).collect();
    let inside = |r: &Rect| r[0] >= bounds[0] && r[1] >= bounds[1] && r[2] <= bounds[2] && r[3] <= bounds[3];
    let mut places = Vec::with_capacity(points.len());
    for (point, half) in points.iter().zip(half_sizes) {
        let candidates = DISTANCES.iter().flat_map(|distance| DIRECTIONS.iter().map(move |d| (distance, d)));
        let center = |(distance, (dx, dy)): (&f64, &(f64, f64))| {
            let offset = |direction: f64, half: i32| (direction * distance * f64::from(radius + half)).round() as i32;
            (point.0 + offset(*dx, half.0), point.1 + offset(*dy, half.1))
        };
        let free = |center: &(i32, i32)| {
            let rect = around(*center, *half);
            inside(&rect) && !taken.iter().any(|other| overlap(&rect, other))
        };
        let found = candidates.map(center).find(free);
        taken.extend(found.map(|center| around(center, *half)));
        places.push(found);
    }
    places
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_overlap_nothing() {
        // A dense cluster, all of one place, and points at the corners.
        let clusters: Vec<(i32, i32)> = (0..40).map(|i| (300 + i * 7 % 60, 200 + i * 13 % 90)).collect();
        for points in [clusters, vec![(50, 50); 10], vec![(0, 0), (600, 0), (0, 400), (600, 400)]] {
            let half = vec![(9, 7); points.len()];
            let places = place(&points, &half, 5, [0, 0, 600, 400]);
            let rects: Vec<Rect> = places.iter().flatten().map(|center| around(*center, (9, 7))).collect();
            assert!(rects.len() * 3 >= points.len(), "most find a place: {} of {}", rects.len(), points.len());
            for (i, rect) in rects.iter().enumerate() {
                assert!(rects[..i].iter().all(|other| !overlap(rect, other)));
                assert!(points.iter().all(|point| !overlap(rect, &around(*point, (5, 5)))));
                assert!(rect[0] >= 0 && rect[1] >= 0 && rect[2] <= 600 && rect[3] <= 400);
            }
        }
    }
}
