// What the search of a built site shows: node search.js SITE QUERY... prints, as JSON, the places of the first pages of each.
// The engine is the site's own worker, and each query is worded by the site's search.js.
const fs = require("fs")
const path = require("path")
const vm = require("vm")

const [site, ...queries] = process.argv.slice(2)
const PAGES = 5
const SETUP = 0
const QUERY = 2

function worker() {
  const folder = path.join(site, "assets/javascripts/workers")
  const [file] = fs.readdirSync(folder).filter(name => name.endsWith(".js"))
  let listener
  let answered
  const scope = { console, addEventListener: (_, listens) => { listener = listens }, postMessage: answer => answered(answer) }
  scope.self = scope
  vm.runInNewContext(fs.readFileSync(path.join(folder, file), "utf8"), scope)
  return message => new Promise(resolve => { answered = resolve; listener({ data: message }) })
}

async function main() {
  const own = vm.createContext({})
  const wording = fs.readFileSync(path.join(site, "search.js"), "utf8")
  vm.runInContext(wording, own)
  vm.runInContext(wording, own) // fails if it declares a name for all scripts of a page, where the theme may have it, too
  const ask = worker()
  const index = JSON.parse(fs.readFileSync(path.join(site, "search/search_index.json"), "utf8"))
  await ask({ type: SETUP, data: { ...index, options: { suggest: true } } })
  const places = {}
  for (const query of queries) {
    const { data } = await ask({ type: QUERY, data: own.wordedQuery(query) })
    places[query] = data.items.slice(0, PAGES).map(page => page.reduce((best, part) => (part.score > best.score ? part : best)).location)
  }
  console.log(JSON.stringify(places))
}

main()
