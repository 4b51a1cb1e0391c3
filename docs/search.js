// What the search engine is asked for. It takes a hyphen for "without this word" and any word for the beginning of others;
// our readers look for flags, and for words as they typed them. The box itself stays as they typed it.
;(() => { // names here must not meet those of the theme's scripts
  // Words that say nothing about a page, unless a query has no others.
  const EMPTY = new Set(("a about after all also am an and any are as at be because been but by can cannot could did do does either " +
    "else for from get got had has have how i if in into is it its just like may me might most must my neither no nor not of off " +
    "often on only or other our out own so some than that the their them then there these they this to too us was we were what when " +
    "where which while who why will with would yet you your").split(" "))

  // A word as typed counts more than one that begins with it.
  const wanted = word => `${word}^6 ${word}`
  const telling = words => words.filter(word => !EMPTY.has(word))

  // A flag has all of its parts, the last one perhaps half typed. Its own entry is first: entries of flags are tagged with the
  // first letters of their parts, and a letter that a page lacks is not shown as missing if a word of the page begins with it.
  function flag(typed) {
    const parts = telling(typed.split("-").filter(Boolean))
    const letters = parts.map(part => part[0]).filter(letter => !EMPTY.has(letter)).slice(0, 1)
    const whole = parts.map((part, place) => `+${part}${place + 1 < parts.length ? "" : "*"}`)
    return [...whole, ...parts.map(part => `${part}^6`), ...letters.map(letter => `tags:${letter}^100`)]
  }

  // A key, such as train_batch_size, is one word where a page has it, and its parts elsewhere.
  const key = typed => [`${typed}^100`, ...telling(typed.split("_").filter(Boolean))]

  function rewritten(typed) {
    if (typed.includes('"')) return typed // a phrase
    const asked = typed.toLowerCase().split(/[\s,;:!?=<>()[\]{}'`|/~^*+]+/).filter(word => /\w/.test(word))
    const flags = asked.filter(word => word.startsWith("--"))
    const words = asked.filter(word => !word.startsWith("--")).flatMap(word => word.split("-")).filter(Boolean)
    const chosen = telling(words).length || flags.length ? telling(words) : words
    return [...flags.flatMap(flag), ...chosen.flatMap(word => (word.includes("_") ? key(word) : wanted(word)))].join(" ")
  }

  globalThis.wordedQuery = rewritten // for tests

  if (typeof Worker !== "undefined") {
    const QUERY = 2 // the kind of the theme's messages to its search worker that carry a query
    const send = Worker.prototype.postMessage
    Worker.prototype.postMessage = function (message, ...rest) {
      const query = message && message.type === QUERY && typeof message.data === "string"
      return send.call(this, query ? { ...message, data: rewritten(message.data) } : message, ...rest)
    }
  }
})()
