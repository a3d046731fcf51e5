// The map of a report: spots are painted into a pixel buffer, so that a million take one pass over two arrays and the
// colours are exact; no library, no WebGL. Texts from the data only ever become text nodes.
(async () => {
  "use strict";
  const $ = (id) => document.getElementById(id);
  const meta = JSON.parse($("meta").textContent);
  const canvas = $("tissue"), context = canvas.getContext("2d"), tip = $("tip");

  async function unpacked() {
    const text = atob($("spots").textContent.trim());
    const bytes = Uint8Array.from(text, (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  }
  let data;
  try {
    data = await unpacked();
  } catch (error) {
    $("hint").textContent = "This browser cannot unpack the map; the tables below hold the numbers.";
    return;
  }
  const part = (name) => data.subarray(meta.parts[name][0], meta.parts[name][0] + meta.parts[name][1]);
  // two bytes a number, differences of successive spots, low bytes before high ones: so they pack well
  function coordinates(name) {
    const bytes = part(name), n = meta.n, out = new Uint16Array(n);
    for (let i = 0, last = 0; i < n; i++) out[i] = last = (last + bytes[i] + (bytes[n + i] << 8)) & 65535;
    return out;
  }
  function wide(name) { // codes of one or two bytes
    const bytes = part(name), n = meta.n;
    if (bytes.length === n) return bytes;
    const out = new Uint16Array(n);
    for (let i = 0; i < n; i++) out[i] = bytes[i] | (bytes[n + i] << 8);
    return out;
  }
  const n = meta.n, x = coordinates("x"), y = coordinates("y"), domain = wide("domain"), sample = wide("sample");
  const side = 65536 >> meta.shift, start = new Uint32Array(side * side + 1); // spots come sorted by cell
  for (let i = 0; i < n; i++) start[(y[i] >> meta.shift) * side + (x[i] >> meta.shift) + 1]++;
  for (let c = 0; c < side * side; c++) start[c + 1] += start[c];

  const shown = new Uint8Array(meta.domains.length).fill(1);
  let chosen = -1, colouring = "domain", view = { scale: 1, x: 0, y: 0 }, values = null, binned = false, focus = -1;
  let width = 0, height = 0, ratio = 1, image = null, pixels = null, waiting = false;

  const packed = ([r, g, b]) => (255 << 24 | b << 16 | g << 8 | r) >>> 0;
  const hex = (text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
  const palette = Uint32Array.from(meta.domains, (each) => packed(hex(each.color)));
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const isDark = () => getComputedStyle(document.documentElement).colorScheme === "dark";
  const expand = (text) => text.length === 4 ? "#" + [...text.slice(1)].map((each) => each + each).join("") : text;
  let ramp = new Uint32Array(256), ghost = 0, paper = 0, stops = [];
  function dress() { // colours of the theme
    ghost = packed(hex(expand(css("--ghost"))));
    paper = packed(hex(expand(css("--paper"))));
    stops = (isDark() ? ["#2b323b", "#1f6fae", "#7cc4e8", "#f4fbff"] : ["#e8e8e8", "#9cc9df", "#2c7fb8", "#08306b"]).map(hex);
    for (let v = 0; v < 256; v++) {
      const at = Math.min(v / 255 * (stops.length - 1), stops.length - 1.001), k = Math.floor(at), t = at - k;
      ramp[v] = packed(stops[k].map((low, j) => Math.round(low + t * (stops[k + 1][j] - low))));
    }
    const strip = $("strip"), line = strip.getContext("2d"), row = line.createImageData(256, 1);
    new Uint32Array(row.data.buffer).set(ramp);
    strip.width = 256; strip.height = 1;
    line.putImageData(row, 0, 0);
  }

  const valueOf = (i) => binned
    ? values[(y[i] >> meta.bin_shift) * (65536 >> meta.bin_shift) + (x[i] >> meta.bin_shift)] : values[i];

  function paint() {
    waiting = false;
    if (!image) return;
    pixels.fill(paper);
    const scale = view.scale * ratio, left = view.x * ratio, top = view.y * ratio;
    const radius = Math.max(0.5, meta.size / 2 * scale), reach = Math.ceil(radius);
    const half = []; // of every row of a disc
    for (let d = -reach; d <= reach; d++) half.push(Math.abs(d) <= radius ? Math.round(Math.sqrt(radius * radius - d * d)) : -1);
    const w = image.width, h = image.height, cell = 1 << meta.shift, room = radius / scale;
    const clamp = (value) => Math.max(0, Math.min(side - 1, Math.floor(value / cell)));
    const c0 = clamp(-left / scale - room), c1 = clamp((w - left) / scale + room);
    const r0 = clamp(-top / scale - room), r1 = clamp((h - top) / scale + room);
    for (const pass of [0, 1]) { // hidden domains first, faint, below the others
      if (pass === 0 && shown.every((on) => on)) continue;
      for (let r = r0; r <= r1; r++) {
        const end = start[r * side + c1 + 1];
        for (let i = start[r * side + c0]; i < end; i++) {
          if (chosen >= 0 && sample[i] !== chosen) continue;
          const k = domain[i];
          if (shown[k] !== pass) continue;
          const color = pass === 0 ? ghost : values ? ramp[valueOf(i)] : palette[k];
          const px = Math.round(x[i] * scale + left), py = Math.round(y[i] * scale + top);
          if (radius < 1) { // one pixel, or two by two: scattered spots leave fewer holes
            if (px < 0 || px >= w - 1 || py < 0 || py >= h - 1) continue;
            const at = py * w + px;
            pixels[at] = color;
            if (radius > 0.5) pixels[at + 1] = pixels[at + w] = pixels[at + w + 1] = color;
            continue;
          }
          for (let d = -reach; d <= reach; d++) {
            const wing = half[d + reach], row = py + d;
            if (wing < 0 || row < 0 || row >= h) continue;
            const from = Math.max(0, px - wing), to = Math.min(w - 1, px + wing);
            if (to >= from) pixels.fill(color, row * w + from, row * w + to + 1);
          }
        }
      }
    }
    context.putImageData(image, 0, 0);
    if (focus >= 0) { // a ring around the spot that is told about
      context.beginPath();
      context.arc(x[focus] * scale + left, y[focus] * scale + top, Math.max(radius + 2 * ratio, 5 * ratio), 0, 7);
      context.lineWidth = 2 * ratio;
      context.strokeStyle = css("--ink");
      context.stroke();
    }
    scaleBar();
  }
  const repaint = () => { if (!waiting) { waiting = true; requestAnimationFrame(paint); } };

  function scaleBar() {
    if (!meta.microns) return;
    const perPixel = meta.microns / view.scale, most = perPixel * Math.min(140, width / 3);
    const power = 10 ** Math.floor(Math.log10(most)), nice = [5, 2, 1].find((each) => each * power <= most) * power;
    $("bar").hidden = false;
    $("bar").style.width = `${nice / perPixel}px`;
    $("bar").textContent = nice >= 1000 ? `${nice / 1000} mm` : `${nice} µm`;
  }

  function box() {
    return chosen >= 0 ? meta.samples[chosen].box : [0, 0, meta.extent[0], meta.extent[1]];
  }
  function fit() {
    const [x0, y0, x1, y1] = box(), room = meta.size;
    view.scale = Math.min(width / (x1 - x0 + 2 * room), height / (y1 - y0 + 2 * room)) * 0.98;
    view.x = width / 2 - (x0 + x1) / 2 * view.scale;
    view.y = height / 2 - (y0 + y1) / 2 * view.scale;
    repaint();
  }
  function zoom(factor, px = width / 2, py = height / 2) {
    const least = 0.2 * Math.min(width, height) / 65536, next = Math.max(least, Math.min(view.scale * factor, 60 / meta.size * 4));
    view.x = px - (px - view.x) * next / view.scale;
    view.y = py - (py - view.y) * next / view.scale;
    view.scale = next;
    repaint();
  }
  function resize() {
    const before = [width, height];
    width = canvas.clientWidth; height = canvas.clientHeight; ratio = Math.min(window.devicePixelRatio || 1, 3);
    if (!width || !height) return;
    canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio);
    image = context.createImageData(canvas.width, canvas.height);
    pixels = new Uint32Array(image.data.buffer);
    if (before[0] !== width || before[1] !== height) fit(); else repaint();
  }

  function nearest(px, py) {
    const at = [(px - view.x) / view.scale, (py - view.y) / view.scale], far = Math.max(meta.size, 12 / view.scale);
    const clamp = (value) => Math.max(0, Math.min(side - 1, value >> meta.shift));
    let best = -1, least = far * far;
    for (let r = clamp(at[1] - far); r <= clamp(at[1] + far); r++) {
      const end = start[r * side + clamp(at[0] + far) + 1];
      for (let i = start[r * side + clamp(at[0] - far)]; i < end; i++) {
        if (!shown[domain[i]] || (chosen >= 0 && sample[i] !== chosen)) continue;
        const d = (x[i] - at[0]) ** 2 + (y[i] - at[1]) ** 2;
        if (d < least) { least = d; best = i; }
      }
    }
    return best;
  }
  const line = (text, tag = "div") => Object.assign(document.createElement(tag), { textContent: text });
  const amount = (scale, byte) => scale.low + (scale.high - scale.low) * byte / 255;
  function tell(i, px, py) {
    if (i !== focus) { focus = i; repaint(); }
    tip.hidden = i < 0;
    if (i < 0) return;
    const mine = meta.domains[domain[i]], lines = [line(`Domain ${mine.name}`, "b")];
    if (meta.samples.length > 1) lines.push(line(`${meta.sample_key}: ${meta.samples[sample[i]].name}`));
    for (const each of meta.measures) lines.push(line(`${each.name} ${amount(each, part(each.part)[i]).toFixed(2)}`));
    for (const gene of mine.genes) {
      const bytes = part(gene.part), at = meta.bin_shift
        ? (y[i] >> meta.bin_shift) * (65536 >> meta.bin_shift) + (x[i] >> meta.bin_shift) : i;
      lines.push(line(`${gene.name}: ${amount(gene, bytes[at]).toFixed(2)}${meta.bin_shift ? " around here" : ""}`));
    }
    tip.replaceChildren(...lines);
    const w = tip.offsetWidth, h = tip.offsetHeight;
    tip.style.left = `${Math.max(4, px + 14 + w > width ? px - w - 14 : px + 14)}px`;
    tip.style.top = `${Math.max(4, Math.min(py + 14, height - h - 4))}px`;
    $("spoken").textContent = lines.map((each) => each.textContent).join(", ");
  }
  const tellCentre = () => tell(nearest(width / 2, height / 2), width / 2, height / 2);

  // mouse, pen and fingers; one finger scrolls the page up and down, two move and zoom the map
  const fingers = new Map();
  const place = (event) => { const at = canvas.getBoundingClientRect(); return [event.clientX - at.left, event.clientY - at.top]; };
  canvas.addEventListener("pointerdown", (event) => {
    fingers.set(event.pointerId, place(event));
    canvas.setPointerCapture(event.pointerId);
    canvas.focus({ preventScroll: true });
    if (event.pointerType !== "mouse") tell(nearest(...place(event)), ...place(event));
  });
  canvas.addEventListener("pointermove", (event) => {
    const now = place(event), last = fingers.get(event.pointerId);
    if (!last) { tell(nearest(...now), ...now); return; }
    fingers.set(event.pointerId, now);
    const other = [...fingers].find(([id]) => id !== event.pointerId);
    if (other) {
      const spread = (a, b) => Math.hypot(a[0] - b[0], a[1] - b[1]);
      zoom(spread(now, other[1]) / Math.max(spread(last, other[1]), 1), ...other[1]);
    } else {
      view.x += now[0] - last[0];
      view.y += now[1] - last[1];
      repaint();
    }
  });
  for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, (event) => fingers.delete(event.pointerId));
  canvas.addEventListener("pointerleave", () => tell(-1));
  canvas.addEventListener("wheel", (event) => { // the page scrolls until the map was clicked
    if (document.activeElement !== canvas && !event.ctrlKey) return;
    event.preventDefault();
    zoom(Math.exp(-event.deltaY / 400), ...place(event));
  }, { passive: false });
  canvas.addEventListener("dblclick", (event) => zoom(2, ...place(event)));
  canvas.addEventListener("keydown", (event) => {
    const step = 0.12 * Math.min(width, height);
    const actions = {
      ArrowLeft: () => { view.x += step; }, ArrowRight: () => { view.x -= step; },
      ArrowUp: () => { view.y += step; }, ArrowDown: () => { view.y -= step; },
      "+": () => zoom(1.4), "=": () => zoom(1.4), "-": () => zoom(1 / 1.4), 0: fit, Escape: () => tell(-1), Enter: () => {},
    };
    if (!(event.key in actions)) return;
    event.preventDefault();
    actions[event.key]();
    repaint();
    if (event.key !== "Escape") tellCentre();
  });

  function colour(name) {
    colouring = name;
    const scale = [...meta.measures, ...meta.genes].find((each) => each.part === name);
    values = scale ? part(name) : null;
    binned = Boolean(scale) && name.startsWith("gene") && meta.bin_shift > 0;
    $("ramp").hidden = !scale;
    if (scale) { $("low").textContent = scale.low.toPrecision(2); $("high").textContent = scale.high.toPrecision(2); }
    repaint();
  }
  $("colour").addEventListener("change", (event) => colour(event.target.value));
  $("sample")?.addEventListener("change", (event) => { chosen = Number(event.target.value); tell(-1); fit(); });
  const boxes = [...document.querySelectorAll("#legend input")];
  boxes.forEach((box, k) => box.addEventListener("change", () => { shown[k] = box.checked ? 1 : 0; tell(-1); repaint(); }));
  const all = (on) => { boxes.forEach((box, k) => { box.checked = on; shown[k] = on ? 1 : 0; }); repaint(); };
  $("all").addEventListener("click", () => all(true));
  $("none").addEventListener("click", () => all(false));
  $("closer").addEventListener("click", () => zoom(1.5));
  $("wider").addEventListener("click", () => zoom(1 / 1.5));
  $("whole").addEventListener("click", fit);
  $("save").addEventListener("click", () => {
    const link = document.createElement("a");
    focus = -1;
    paint();
    link.download = "map.png";
    link.href = canvas.toDataURL("image/png");
    link.click();
  });
  const redress = () => { dress(); repaint(); };
  $("theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    redress();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redress);
  const folded = document.querySelectorAll("details");
  let kept = [], wasTheme;
  addEventListener("beforeprint", () => { // on paper all is open, and light
    kept = [...folded].map((each) => each.open);
    folded.forEach((each) => { each.open = true; });
    wasTheme = document.documentElement.dataset.theme;
    document.documentElement.dataset.theme = "light";
    tell(-1); dress(); paint();
  });
  addEventListener("afterprint", () => {
    folded.forEach((each, k) => { each.open = kept[k]; });
    if (wasTheme) document.documentElement.dataset.theme = wasTheme; else delete document.documentElement.dataset.theme;
    redress();
  });
  dress();
  new ResizeObserver(resize).observe(canvas);
  resize();
  colour("domain");
  canvas.dataset.ready = "yes";
})();
