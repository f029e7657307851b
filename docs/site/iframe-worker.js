// Browsers refuse web workers on pages opened from a disk, and the search runs in one. There, an invisible frame takes its place.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inner = frame.contentWindow;
      inner.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        if (this.onmessage) this.onmessage(event);
        this.dispatchEvent(event);
      };
      inner.importScripts = (...sources) =>
        sources.reduce((done, source) => done.then(() => load(inner.document, source)), Promise.resolve());
      load(inner.document, url).then(() => {
        this.inner = inner;
        for (const data of this.waiting) this.deliver(data);
      });
    }
    deliver(data) {
      this.inner.dispatchEvent(new this.inner.MessageEvent("message", { data }));
    }
    postMessage(data) {
      if (this.inner) this.deliver(data);
      else this.waiting.push(data);
    }
    terminate() {}
  };
  window.Worker = window.IFrameWorker;
}

function load(page, source) {
  return new Promise((resolve, reject) => {
    const script = page.createElement("script");
    script.src = source;
    script.onload = resolve;
    script.onerror = reject;
    page.body.append(script);
  });
}
