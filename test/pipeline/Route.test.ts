// SPDX-License-Identifier: AGPL-3.0-or-later
/** The wiring as a whole: every fault found with its place, and nothing found where none is. */
import { assert, describe, it } from "@effect/vitest"
import * as Arbitrary from "effect/Arbitrary"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Schema from "effect/Schema"
import type * as Decode from "../../src/config/Decode.ts"
import * as Ini from "../../src/config/Ini.ts"
import * as Route from "../../src/pipeline/Route.ts"
import * as Stage from "../../src/pipeline/Stage.ts"
import * as Verdict from "../../src/pipeline/Verdict.ts"
import { fakes } from "../support/FakeStages.ts"

const source = (text: string): Decode.Source => ({
  main: "p.conf",
  base: "/etc",
  builtIn: false,
  cpus: 3,
  environment: {},
  warnings: [],
  sections: Ini.assemble(Ini.parse("p.conf", text).items)
})

const entry = (section: string): Decode.Entry => ({
  from: "pepsi-ingress",
  option: "STAGE",
  section,
  origin: { file: "p.conf", line: 0 }
})

const programs: Route.Programs = {
  names: fakes.map(({ name }) => name),
  found: new Map(fakes.map((stage) => [stage.name, stage]))
}

const wire = (text: string, { defaults = { allowFusion: true, synchronousCommit: false } } = {}) =>
  Route.wire(source(text), { programs, defaults, entries: [entry("init")] })

const problems = (text: string): ReadonlyArray<string> => wire(text).problems.map(Ini.format)

const section = (text: string, name: string): Route.Section => {
  const wiring = wire(text)
  assert.deepStrictEqual(wiring.problems, [])
  return wiring.sections.find((one) => one.name === name)!
}

const init = "[stage-init]\nPROGRAM = pass\nNEXT = end\n"
const end = "[stage-end]\nPROGRAM = discard\n"

describe("Route.wire", () => {
  it("decodes a section with its own options, the common ones and their defaults", () => {
    const { load, name, next, settings, targets, ...rest } = section(
      `[stage-init]\nPROGRAM = if\nELSE = end\nWHEN_1 = a => end\nTIMEOUT = 1 min\n${end}`,
      "init"
    )
    assert.deepStrictEqual([name, load, next], ["init", "headers", undefined])
    assert.deepStrictEqual(settings["WHEN"], [{ to: "end" }])
    assert.deepStrictEqual(
      targets.map(({ option, origin }) => [option, origin.line]),
      [
        ["WHEN_1", 4],
        ["ELSE", 3]
      ]
    )
    assert.deepInclude(rest, {
      failure: undefined,
      parallelism: 3,
      queueLimit: 64,
      fusion: true,
      timeout: Duration.minutes(1),
      synchronousCommit: false,
      user: "",
      dbRole: "",
      origin: { file: "p.conf", line: 1 }
    })
  })

  it("finds sections whatever the case of NEXT", () => {
    assert.strictEqual(
      section("[Stage-Init]\nPROGRAM = pass\nNEXT = END\n" + end, "init").next,
      "end"
    )
  })

  it("a stage that declares a common option again gives it another default", () => {
    assert.deepStrictEqual(
      section("[stage-init]\nPROGRAM = relay\n", "init").timeout,
      Duration.minutes(20)
    )
  })

  it("FUSION and SYNCHRONOUS_COMMIT follow the sections above unless they are written", () => {
    const text = `${init}${end}FUSION = no\nSYNCHRONOUS_COMMIT = yes\n`
    const all = (defaults: Route.Defaults) =>
      wire(text, { defaults }).sections.map(({ fusion, synchronousCommit }) => [
        fusion,
        synchronousCommit
      ])
    assert.deepStrictEqual(all({ allowFusion: true, synchronousCommit: false }), [
      [true, false],
      [false, true]
    ])
    assert.deepStrictEqual(all({ allowFusion: false, synchronousCommit: true }), [
      [false, true],
      [false, true]
    ])
  })

  it("warns where FUSION = yes can have no effect", () => {
    assert.deepStrictEqual(wire("[stage-init]\nPROGRAM = relay\nFUSION = yes").warnings, [
      "p.conf:3: [stage-init] FUSION: relay never runs behind another stage"
    ])
  })

  it("privacy 4.3 (5): NEXT that names no section", () => {
    assert.deepStrictEqual(problems("[stage-init]\nPROGRAM = pass\nNEXT = ende\n" + end), [
      "p.conf:3: [stage-init] NEXT: there is no section [stage-ende]; did you mean end?"
    ])
  })

  it("privacy 4.3 (5): DEMAND_STAGE that names no section", () => {
    const text =
      "[stage-init]\nPROGRAM = encrypt\nNEXT = end\nKEY_WAIT = 1 s\nTOKEN_FILE = x\n" +
      "DEMAND_STAGE = zzz\n"
    assert.deepStrictEqual(problems(text + end), [
      "p.conf:6: [stage-init] DEMAND_STAGE: there is no section [stage-zzz]"
    ])
  })

  it("privacy 4.3 (4): a stage does not start without an option that it needs", () => {
    assert.deepStrictEqual(
      problems("[stage-init]\nPROGRAM = encrypt\nNEXT = end\nKEY_WAIT = 1 s\n" + end),
      ["p.conf:1: [stage-init] TOKEN_FILE is missing; example 'TOKEN_FILE = some text'"]
    )
  })

  it("privacy 4.3 (5): a cycle in which no stage waits", () => {
    const text =
      "[stage-init]\nPROGRAM = if\nWHEN_1 = a => b\nELSE = end\n" +
      "[stage-b]\nPROGRAM = pass\nNEXT = init\n"
    assert.deepStrictEqual(problems(text + end), [
      "p.conf:7: [stage-b] NEXT: init -> b -> init is an endless loop"
    ])
    // FAILURE leads round as well, and a section may lead to itself.
    assert.deepStrictEqual(
      problems("[stage-init]\nPROGRAM = local\nMAILDIR = /m\nFAILURE = init\n"),
      ["p.conf:4: [stage-init] FAILURE: init -> init is an endless loop"]
    )
  })

  it("a cycle with a stage that waits is no fault", () => {
    assert.deepStrictEqual(
      problems(
        "[stage-init]\nPROGRAM = relay\nFAILURE = b\n[stage-b]\nPROGRAM = pass\nNEXT = init\n"
      ),
      []
    )
  })

  it("tells of NEXT where it is missing and where it has no meaning", () => {
    assert.deepStrictEqual(
      problems("[stage-init]\nPROGRAM = pass\n[stage-end]\nPROGRAM = discard\nNEXT = init\n"),
      [
        "p.conf:1: [stage-init] NEXT is missing; pass hands mail on",
        "p.conf:5: [stage-end] NEXT: discard hands nothing on"
      ]
    )
  })

  it("names the nearest program for an unknown one, and checks what all sections share", () => {
    assert.deepStrictEqual(
      problems("[stage-init]\nPROGRAM = discrad\nLOUD = yes\nPARALLELISM = many\nTIMEOUT = 1 s\n"),
      [
        "p.conf:2: [stage-init] PROGRAM: there is no stage 'discrad'; did you mean discard?",
        "p.conf:4: [stage-init] PARALLELISM: 'many' is not a whole number from 1 to 256; example '4'"
      ]
    )
    assert.deepStrictEqual(problems("[stage-init]\nNEXT = init"), [
      "p.conf:1: [stage-init] PROGRAM is missing; example 'PROGRAM = local'"
    ])
  })

  it("tells of a section that is there twice in one file, not of one continued in another", () => {
    assert.deepStrictEqual(problems(`${init}${end}[stage-end]\nQUEUE_LIMIT = 1`), [
      "p.conf:6: [stage-end] is there already, at p.conf:4"
    ])
    const items = [
      ...Ini.parse("a", init + end).items,
      ...Ini.parse("b", "[stage-end]\nQUEUE_LIMIT = 1").items
    ]
    const continued = { ...source(""), sections: Ini.assemble(items) }
    const defaults = { allowFusion: true, synchronousCommit: false }
    const wiring = Route.wire(continued, { programs, defaults, entries: [entry("init")] })
    assert.deepStrictEqual(wiring.problems, [])
    assert.strictEqual(wiring.sections[1]!.queueLimit, 1)
  })

  it("tells of sections that no mail reaches, and of those that it cannot leave", () => {
    assert.deepStrictEqual(problems(init + end + "[stage-lone]\nPROGRAM = discard\n"), [
      "p.conf:6: [stage-lone] is reached by no mail; if it enters there, name it in [pepsi] ENTRIES"
    ])
    // A stage of the cycle waits, so it is not endless; what is wrong is that nothing ends.
    const stages = [
      ...fakes,
      { ...fakes.find(({ name }) => name === "pass")!, name: "park", waits: true }
    ]
    const found = new Map(stages.map((stage) => [stage.name, stage]))
    const wiring = Route.wire(
      source("[stage-init]\nPROGRAM = if\nELSE = p\n[stage-p]\nPROGRAM = park\nNEXT = init"),
      {
        programs: { names: [], found },
        defaults: { allowFusion: true, synchronousCommit: false },
        entries: [entry("init")]
      }
    )
    assert.deepStrictEqual(wiring.problems.map(Ini.format), [
      "p.conf:1: [stage-init] is a dead end: no way leads on to a section that ends",
      "p.conf:4: [stage-p] is a dead end: no way leads on to a section that ends"
    ])
  })

  it("tells of an entry that is no section", () => {
    assert.deepStrictEqual(problems(end), [
      "p.conf: [pepsi-ingress] STAGE: there is no section [stage-init]"
    ])
  })

  it("finds all faults at once", () => {
    assert.lengthOf(
      problems(
        "[stage-init]\nPROGRAM = pas\nQUEUE_LIMIT = X\n[stage-b]\nPROGRAM = pass\nNEXT = c\nFOO = 1\n"
      ),
      3
    )
  })
})

/** Up to six sections; each waits or not, ends or not, and leads to some others. */
const size = 6
const node = Arbitrary.all({
  waits: Arbitrary.schema(Schema.Boolean),
  ends: Arbitrary.schema(Schema.Boolean),
  to: Arbitrary.array(
    Arbitrary.schema(Schema.Int.check(Schema.isBetween({ minimum: 0, maximum: size - 1 }))),
    {
      maxLength: 3
    }
  )
})
const graph = Arbitrary.array(node, { minLength: size, maxLength: size })

const stage = (waits: boolean, ends: boolean): Stage.Stage =>
  Stage.define({
    name: "x",
    load: "metadata",
    effect: "none",
    fusible: true,
    uses: [],
    waits,
    next: ends ? "none" : "required",
    settings: {},
    run: () => Effect.succeed(Verdict.pass)
  })

const toSections = (
  nodes: ReadonlyArray<{ waits: boolean; ends: boolean; to: ReadonlyArray<number> }>
) =>
  nodes.map(
    ({ ends, to, waits }, i): Route.Section => ({
      name: `s${i}`,
      origin: { file: "f", line: i },
      stage: stage(waits, ends),
      settings: {},
      load: "metadata",
      next: undefined,
      failure: undefined,
      parallelism: 1,
      queueLimit: 1,
      fusion: true,
      timeout: Duration.minutes(5),
      synchronousCommit: false,
      user: "",
      dbRole: "",
      targets: to.map((j) => ({ option: "NEXT", section: `s${j}`, origin: { file: "f", line: i } }))
    })
  )

/** Whether a way leads from i to j, in one step or more; the textbook's closure (Warshall). */
const closure = (
  edges: (i: number) => ReadonlyArray<number>
): ReadonlyArray<ReadonlyArray<boolean>> => {
  const way = Array.from({ length: size }, (_, i) =>
    Array.from({ length: size }, (_, j) => edges(i).includes(j))
  )
  for (let k = 0; k < size; k++) {
    for (let i = 0; i < size; i++) {
      for (let j = 0; j < size; j++) way[i]![j] ||= way[i]![k]! && way[k]![j]!
    }
  }
  return way
}

describe("Route.check", () => {
  it.prop("agrees with the closure of the graph", [graph], ([nodes]) => {
    const names = nodes.map((_, i) => `s${i}`)
    const found = Route.check(toSections(nodes), names, [entry("s0")])
    const lines = (about: string) =>
      found
        .filter(({ text }) => text.includes(about))
        .map(({ origin }) => origin.line)
        .toSorted()

    const way = closure((i) => nodes[i]!.to)
    const unreached = names.flatMap((_, i) => (i === 0 || way[0]![i] ? [] : [i]))
    assert.deepStrictEqual(lines("is reached by no mail"), unreached)

    const stuck = names.flatMap((_, i) =>
      nodes[i]!.ends || nodes.some(({ ends }, j) => ends && way[i]![j]) ? [] : [i]
    )
    assert.deepStrictEqual(lines("is a dead end"), stuck)

    const restless = closure((i) => (nodes[i]!.waits ? [] : nodes[i]!.to))
    const looping = new Set(names.filter((_, i) => restless[i]![i]))
    const named = new Set(
      found.flatMap(
        ({ text }) => /: (s\d.*) is an endless loop/.exec(text)?.[1]?.split(" -> ") ?? []
      )
    )
    assert.deepStrictEqual([...named].toSorted(), [...looping].toSorted())
  })
})
