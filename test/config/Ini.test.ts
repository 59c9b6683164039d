// SPDX-License-Identifier: AGPL-3.0-or-later
/** The text of the configuration: what is read, what is refused, and that printing reverses it. */
import { assert, describe, it } from "@effect/vitest"
import * as Arbitrary from "effect/Arbitrary"
import * as Result from "effect/Result"
import * as Schema from "effect/Schema"
import * as Ini from "../../src/config/Ini.ts"

const read = (text: string) => Ini.assemble(Ini.parse("p.conf", text).items)

const value = (text: string, option = "X"): string | undefined =>
  read(`[a]\n${text}`)[0]?.options.find((one) => one.option === option)?.value

const problems = (text: string): ReadonlyArray<string> =>
  Ini.parse("p.conf", text).problems.map(Ini.format)

const characters = "aZ09 \t\"#%=[]@$_-.,;äß€\u{1F600}'\\"
const letter = Arbitrary.schema(Schema.Literals(Array.from(characters)))
const text = Arbitrary.map(Arbitrary.array(letter, { maxLength: 12 }), (all) => all.join(""))
const name = (first: string) =>
  Arbitrary.map(
    Arbitrary.schema(Schema.Literals(["a", "b-2", "c_d", "stage"])),
    (rest) => first + rest
  )
const document = Arbitrary.array(
  Arbitrary.all({
    section: name("s."),
    options: Arbitrary.array(Arbitrary.all({ option: name("O_"), value: text }), { maxLength: 5 })
  }),
  { maxLength: 5 }
)

const toItems = (
  sections: ReadonlyArray<{
    readonly section: string
    readonly options: ReadonlyArray<{ readonly option: string; readonly value: string }>
  }>
): ReadonlyArray<Ini.Item> => {
  const origin = { file: "made", line: 1 }
  return sections.flatMap(
    ({ options, section }): Array<Ini.Item> => [
      { _tag: "Header", section, origin },
      ...options.map(
        (one): Ini.Item => ({
          _tag: "Assignment",
          section,
          option: one.option.toUpperCase(),
          value: one.value,
          origin,
          secret: false
        })
      )
    ]
  )
}

const meaning = (sections: Ini.Document) =>
  sections.map(({ name, options }) => [name, options.map((one) => [one.option, one.value])])

describe("Ini.parse", () => {
  it("keeps file and line of every assignment", () => {
    const [section] = read("# c\n[a]\nX = 1\n\nY=2\n")
    assert.deepStrictEqual(section, {
      name: "a",
      headers: [{ file: "p.conf", line: 2 }],
      options: [
        { option: "X", value: "1", origin: { file: "p.conf", line: 3 }, secret: false },
        { option: "Y", value: "2", origin: { file: "p.conf", line: 5 }, secret: false }
      ]
    })
  })

  it("takes names without regard to case, and lets the later assignment count", () => {
    assert.deepStrictEqual(meaning(read("[Stage-A]\nnext = B\n[sTAGE-a]\nNEXT = c")), [
      ["stage-a", [["NEXT", "c"]]]
    ])
  })

  it("ignores outer blanks and CR before LF, and reads the first = only", () => {
    assert.strictEqual(value("\t X\t=  a = b \t\r\n"), "a = b")
  })

  it("keeps blanks in quotes, without escapes", () => {
    assert.strictEqual(value('X = " a \\" "'), ' a \\" ')
    assert.strictEqual(value('X = ""'), "")
    assert.strictEqual(value('X = "a" b'), '"a" b')
    assert.strictEqual(value('X = "'), '"')
  })

  it("takes # and % for comments only where a line begins", () => {
    assert.strictEqual(value("  # X = 1\n  % X = 2\nX = 3 # no comment"), "3 # no comment")
  })

  it("reads the three directives", () => {
    const items = Ini.parse(
      "p.conf",
      [
        "@inline@ other.conf",
        "@INLINE-MATCHING@ conf.d/*.conf",
        '@inline-secret@ Keys "a b.conf"'
      ].join("\n")
    ).items
    assert.deepStrictEqual(items, [
      { _tag: "Inline", file: "other.conf", origin: { file: "p.conf", line: 1 } },
      { _tag: "InlineMatching", pattern: "conf.d/*.conf", origin: { file: "p.conf", line: 2 } },
      {
        _tag: "InlineSecret",
        section: "keys",
        file: "a b.conf",
        origin: { file: "p.conf", line: 3 }
      }
    ])
  })

  it("refuses, with its line, each line that says nothing", () => {
    assert.deepStrictEqual(
      problems("X = 1\n[a] # c\n[a]\nno\n@inlin@ f\n1X = 2\n@inline-secret@ keys"),
      [
        "p.conf:1: X stands before the first [section]",
        "p.conf:2: is no section header; example '[stage-local]', with comments on lines of their own",
        "p.conf:4: is no section, no 'OPTION = VALUE' and no comment",
        "p.conf:5: is none of @inline@ FILE, @inline-matching@ GLOB, @inline-secret@",
        "p.conf:6: '1X' is no name of an option",
        "p.conf:7: needs a section and a file; example '@inline-secret@ pepsi-keys secrets.conf'"
      ]
    )
  })

  it.each(["\r", "\0", "\u001b", "\u0085", "\u2028", "\u2029", "\u007f"])(
    "R67: a value with the control character %j would add a line to a header: refused",
    (control) => {
      assert.deepStrictEqual(problems(`[a]\nX = Ann${control}Bcc: eve@example.org`), [
        "p.conf:2: holds a control character"
      ])
    }
  )

  it("refuses octets that are no UTF-8, and lines beyond the bound", () => {
    assert.deepStrictEqual(problems("[a]\nX = J\uFFFDrg"), ["p.conf:2: is not UTF-8"])
    assert.deepStrictEqual(problems(`[a]\nX = ${"x".repeat(Ini.maxLineChars)}`), [
      `p.conf:2: is longer than ${Ini.maxLineChars} characters`
    ])
  })

  it("begins behind a byte order mark", () => {
    assert.deepStrictEqual(meaning(read("\uFEFF[a]\nX = 1")), [["a", [["X", "1"]]]])
  })

  it.prop("is total and never gives a control character as a value", [Schema.String], ([any]) => {
    const { items } = Ini.parse("p.conf", `[a]\nX = ${any}\n${any}`)
    return items.every((item) => item._tag !== "Assignment" || !Ini.hasControl(item.value))
  })
})

describe("Ini.print", () => {
  it.prop("gives a text that reads as the same again", [document], ([made]) => {
    const before = Ini.assemble(toItems(made))
    const printed = Ini.print(before)
    assert.deepStrictEqual(problems(printed), [])
    assert.deepStrictEqual(meaning(read(printed)), meaning(before))
  })
})

const variables = (
  paths: { readonly [name: string]: string },
  environment: { readonly [name: string]: string } = {}
): Ini.Variables => ({ paths: new Map(Object.entries(paths)), environment })

const expand = (written: string, known: Ini.Variables) =>
  Result.getOrThrow(Ini.expand(written, known))

describe("Ini.expand", () => {
  it.each([
    ["$A/x", "p/x"],
    ["${a}x", "px"],
    ["$B", "env"],
    ["${C:-d}", "d"],
    ["${C:-${D:-$A}/e}", "p/e"],
    ["${C:-}", ""],
    ["$2 $ $", "$2 $ $"],
    ["$A{mailbox}", "p{mailbox}"]
  ])("puts values in for %s", (written, expected) => {
    const known = variables({ A: "p" }, { A: "shadowed", B: "env" })
    assert.deepStrictEqual(expand(written, known), { text: expected, unknown: [] })
  })

  it("expands what [PATHS] gives again, but nothing from the environment", () => {
    const known = variables({ A: "$B/a" }, { B: "$C", C: "c" })
    assert.strictEqual(expand("$A", known).text, "$C/a")
  })

  it("leaves unknown names as they are and tells of them", () => {
    assert.deepStrictEqual(expand("$X/${Y}/$X/$constructor", variables({})), {
      text: "$X/${Y}/$X/$constructor",
      unknown: ["X", "Y", "constructor"]
    })
  })

  it.each([
    ["$A", { A: "$A" }, "its variables refer to each other without end"],
    ["$A", { A: "${B}", B: "${A:-x}" }, "its variables refer to each other without end"],
    ["${A", {}, "'${' without its '}'"],
    ["${A:+x}", {}, "'${A:+x}' is not ${NAME} or ${NAME:-default}"],
    ["$A$A", { A: "x".repeat(4000) }, "it is longer than 4096 characters"]
  ])("refuses %s", (written, paths, why) => {
    assert.deepStrictEqual(Ini.expand(written, variables(paths)), Result.fail(why))
  })

  it("is not made to double without end, even of nothing", () => {
    const paths = Object.fromEntries(
      Array.from({ length: 100 }, (_, i) => [`A${i}`, `$A${i + 1}$A${i + 1}`])
    )
    assert.deepStrictEqual(
      Ini.expand("$A0", variables({ ...paths, A100: "" })),
      Result.fail("its variables refer to each other without end")
    )
  })
})
