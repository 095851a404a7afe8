/** Server-sent events out of a fetched response: unlike EventSource it shows the status, and sends headers. */

/**
 * The events of a response, as they come.
 * @param {Response} response
 * @returns {AsyncGenerator<{event: string, data: string}>}
 */
export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let event = "message";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const raw of lines) {
        const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
        if (line === "") {
          if (data.length) yield { event, data: data.join("\n") };
          event = "message";
          data = [];
        } else if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        else if (line.startsWith("event:")) event = line.slice(6).trim();
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** What the server says of a request that it refused. @param {Response} response @returns {Promise<string>} */
export async function messageOf(response) {
  try {
    return (await response.json()).error.message || `the server answered ${response.status}`;
  } catch {
    return `the server answered ${response.status}`;
  }
}
