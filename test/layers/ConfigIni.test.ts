// SPDX-License-Identifier: AGPL-3.0-or-later
/** The configuration from real files, from the environment, and from one process to another. */
import { existsSync } from "node:fs"
import { resolve } from "node:path"
import * as NodeFileSystem from "@effect/platform-node/NodeFileSystem"
import { assert, describe, it } from "@effect/vitest"
import * as ConfigProvider from "effect/ConfigProvider"
import * as Effect from "effect/Effect"
import * as FileSystem from "effect/FileSystem"
import * as Layer from "effect/Layer"
import * as PlatformError from "effect/PlatformError"
import * as ConfigIni from "../../layers/ConfigIni.ts"
import * as StagesRegistry from "../../layers/StagesRegistry.ts"
import * as Report from "../../src/config/Report.ts"
import { Configuration } from "../../src/services/Configuration.ts"
import * as FakeStages from "../support/FakeStages.ts"

const vectors = resolve(import.meta.dirname, "../vectors/config")

/** Generated; absent in a checkout that was never built. */
const index = resolve(import.meta.dirname, "../../stages/index.ts")

/** A directory of its own with the files given; a value is text. */
const place = Effect.fnUntraced(function* (files: { readonly [name: string]: string }) {
  const system = yield* FileSystem.FileSystem
  const directory = yield* Effect.flatMap(system.makeTempDirectoryScoped(), system.realPath)
  for (const [name, text] of Object.entries(files)) {
    yield* system.makeDirectory(resolve(directory, name, ".."), { recursive: true })
    yield* system.writeFileString(resolve(directory, name), text)
  }
  return directory
})

const environment = (env: Record<string, string>) =>
  ConfigProvider.layer(ConfigProvider.fromEnv({ env }))

/** The configuration of a file, under an environment of its own. */
const read = (file: string | undefined, env: Record<string, string> = {}) =>
  Configuration.pipe(Effect.provide(ConfigIni.fromFile(file).pipe(Layer.provide(environment(env)))))

const again = (text: string) => Configuration.pipe(Effect.provide(ConfigIni.fromText(text)))

const messages = (file: string) => Effect.map(Effect.flip(read(file)), (error) => error.messages)

const system = Layer.mergeAll(NodeFileSystem.layer, FakeStages.layer)

const example = Effect.fnUntraced(function* (mode: number) {
  const files = yield* FileSystem.FileSystem
  const directory = yield* place({})
  yield* files.copy(vectors, directory, { overwrite: true })
  yield* files.chmod(`${directory}/secrets.conf`, mode)
  return directory
})

const wiring = "[stage-init]\nPROGRAM = local\nMAILDIR = /m\n"

/** Every value in force, whatever it came from. */
const values = (configuration: Configuration["Service"]) =>
  configuration.diagnostics
    .filter(({ secret }) => !secret)
    .map(({ option, section, value }) => [section, option, value])

/** The host's name in the configuration that is found without a file being given. */
const hostname = (env: Record<string, string>) =>
  Effect.map(read(undefined, env), ({ pepsi }) => pepsi.HOSTNAME)

describe("ConfigIni.fromFile", () => {
  it.effect("reads a file with all that it inlines", () =>
    Effect.gen(function* () {
      const directory = yield* example(0o600)
      const found = yield* read(`${directory}/pepsi.conf`, { PEPSI_HOME: "/srv/pepsi" })
      assert.strictEqual(found.pepsi.HOSTNAME, "mx.example.org")
      assert.strictEqual(found.pepsi.LOG, "warn")
      assert.strictEqual(found.pepsi.STATE_DIR, "/srv/pepsi")
      assert.strictEqual(found.ingress.TLS_CERT, `${directory}/tls/cert.pem`)
      assert.strictEqual(found.ingress.TLS_KEY, "/etc/pepsi/key.pem")
      assert.strictEqual(found.postgres.CONFIG, "postgres://pepsi:hunter2@db.example.org/pepsi")
      assert.strictEqual(
        found.pipeline.sections.get("local")!.settings["MAILDIR"],
        "/srv/pepsi/mail/{mailbox}"
      )
      assert.deepStrictEqual([...found.pipeline.sections.keys()], ["init", "discard", "local"])
      assert.deepStrictEqual(found.pipeline.entries, ["init"])
      assert.deepStrictEqual(found.warnings, [])
      const origins = found.diagnostics
        .filter(({ option }) => option === "PARALLELISM")
        .map(({ origin, section }) => [section, origin])
      assert.deepStrictEqual(origins, [
        ["stage-init", undefined],
        ["stage-discard", undefined],
        ["stage-local", { file: `${directory}/conf.d/20-local.conf`, line: 4 }]
      ])
    }).pipe(Effect.provide(system))
  )

  it.effect("privacy 4.3 (1): what is shown means the same when it is read as a file", () =>
    Effect.gen(function* () {
      const directory = yield* example(0o600)
      const before = yield* read(`${directory}/pepsi.conf`, { PEPSI_HOME: "/srv/pepsi" })
      const shown = yield* place({ "p.conf": Report.show(before).join("\n") })
      const after = yield* read(`${shown}/p.conf`)
      assert.deepStrictEqual(values(after), values(before))
      assert.notInclude(Report.show(before).join("\n"), "hunter2")
      assert.deepStrictEqual(Report.show(after), Report.show(before))
    }).pipe(Effect.provide(system))
  )

  it.effect("privacy 4.3 (2): KEY_WAIT = 30sec: no daemon starts", () =>
    Effect.gen(function* () {
      const directory = yield* place({
        "p.conf":
          "[stage-init]\nPROGRAM = encrypt\nNEXT = end\nTOKEN_FILE = t\nKEY_WAIT = 30sec\n" +
          "[stage-end]\nPROGRAM = discard\n"
      })
      assert.deepStrictEqual(yield* messages(`${directory}/p.conf`), [
        `${directory}/p.conf:5: [stage-init] KEY_WAIT: '30sec' is not a duration; example '30 s'`
      ])
    }).pipe(Effect.provide(system))
  )

  it.effect("privacy 4.3 (3): one value, as it is written and as a file name", () =>
    Effect.gen(function* () {
      const directory = yield* example(0o600)
      const found = yield* read(`${directory}/pepsi.conf`, { CREDENTIALS_DIRECTORY: "/run/keys" })
      const value = (expanded: boolean) =>
        Report.value(found, { section: "pepsi-INGRESS", option: "tls_key", expanded })
      assert.strictEqual(value(false), "${CREDENTIALS_DIRECTORY:-/etc/pepsi}/key.pem")
      assert.strictEqual(value(true), "/run/keys/key.pem")
      assert.strictEqual(
        Report.value(found, { section: "pepsi", option: "NONE", expanded: false }),
        undefined
      )
    }).pipe(Effect.provide(system))
  )

  it.effect("privacy 4.3 (4): a missing file of secrets is a warning, an open one is refused", () =>
    Effect.gen(function* () {
      const files = yield* FileSystem.FileSystem
      const directory = yield* example(0o640)
      assert.deepStrictEqual(yield* messages(`${directory}/pepsi.conf`), [
        `${directory}/pepsi.conf:17: ${directory}/secrets.conf: ` +
          "group or others may read these secrets; chmod 600"
      ])
      yield* files.remove(`${directory}/secrets.conf`)
      const found = yield* read(`${directory}/pepsi.conf`)
      assert.strictEqual(found.postgres.CONFIG, undefined)
      assert.deepStrictEqual(found.warnings, [
        `${directory}/pepsi.conf:17: ${directory}/secrets.conf: there is no such file; ` +
          "[pepsi-postgres] goes without it"
      ])
    }).pipe(Effect.provide(system))
  )

  it.effect("collects the errors of all sections and files, each with its place", () =>
    Effect.gen(function* () {
      const directory = yield* place({
        "p.conf":
          "[pepsi]\nHOSTNAME = $myhostname\nLOG = loud\nPROT = 25\n" +
          "@inline@ more.conf\n@inline@ none.conf\n",
        "more.conf":
          "[stage-init]\nPROGRAM = lokal\nnonsense\n[stage-b]\nPROGRAM = pass\nNEXT = c\n"
      })
      const [p, more] = [`${directory}/p.conf`, `${directory}/more.conf`]
      assert.deepStrictEqual((yield* messages(p)).toSorted(), [
        `${more}:2: [stage-init] PROGRAM: there is no stage 'lokal'; did you mean local?`,
        `${more}:3: is no section, no 'OPTION = VALUE' and no comment`,
        `${more}:6: [stage-b] NEXT: there is no section [stage-c]; did you mean b?`,
        `${p}:2: [pepsi] HOSTNAME: '$myhostname' is not a domain name; example 'mail.pepsi.test'`,
        `${p}:3: [pepsi] LOG: 'loud' is not one of trace, debug, info, warn, error, none; example 'info'`,
        `${p}:4: [pepsi] PROT is no option here`,
        `${p}:6: ${directory}/none.conf: there is no such file`
      ])
    }).pipe(Effect.provide(system))
  )

  it.effect("-c with a file that is not there is an error, not the built-in profile", () =>
    Effect.gen(function* () {
      const directory = yield* place({})
      assert.deepStrictEqual(yield* messages(`${directory}/p.conf`), [
        `${directory}/p.conf: there is no such file`
      ])
      assert.deepStrictEqual(yield* messages(directory), [`${directory}: is no regular file`])
    }).pipe(Effect.provide(system))
  )

  it.effect(
    "looks for the user's file before the host's, and has the built-in profile at last",
    () =>
      Effect.gen(function* () {
        const directory = yield* place({
          "xdg/pepsi.conf": `[pepsi]\nHOSTNAME = xdg.example.org\n${wiring}`,
          ".config/pepsi.conf": `[pepsi]\nHOSTNAME = home.example.org\n${wiring}`
        })
        assert.strictEqual(
          yield* hostname({ HOME: directory, XDG_CONFIG_HOME: `${directory}/xdg` }),
          "xdg.example.org"
        )
        assert.strictEqual(yield* hostname({ HOME: directory }), "home.example.org")
        assert.strictEqual(
          yield* hostname({ HOME: "/dev/null", XDG_CONFIG_HOME: `${directory}/none` }),
          "mail.pepsi.test"
        )
      }).pipe(Effect.provide(system))
  )

  it.effect("a file that stands alone has nothing of the built-in profile but the defaults", () =>
    Effect.gen(function* () {
      const directory = yield* place({ "p.conf": wiring })
      const found = yield* read(`${directory}/p.conf`)
      assert.deepStrictEqual([...found.pipeline.sections.keys()], ["init"])
      assert.strictEqual(found.ingress.PORT, 2525)
      assert.strictEqual(found.pepsi.STATE_DIR, resolve("pepsi-data"))
    }).pipe(Effect.provide(system))
  )
})

describe("what surrounds a file", () => {
  it.effect("PEPSI_HOME begins where we were started, not where the file is", () =>
    Effect.gen(function* () {
      const directory = yield* place({ "p.conf": wiring })
      const { pepsi } = yield* read(`${directory}/p.conf`, { PEPSI_HOME: "state" })
      assert.strictEqual(pepsi.STATE_DIR, resolve("state"))
    }).pipe(Effect.provide(system))
  )

  it.effect("a file that we may not see is not passed over for the built-in profile", () =>
    Effect.gen(function* () {
      const files = yield* FileSystem.FileSystem
      const denied = PlatformError.systemError({
        _tag: "PermissionDenied",
        module: "FileSystem",
        method: "stat"
      })
      const shut = FileSystem.make({
        ...files,
        stat: (path) => (path.startsWith("/shut/") ? Effect.fail(denied) : files.stat(path)),
        realPath: (path) => (path.startsWith("/shut/") ? Effect.fail(denied) : files.realPath(path))
      })
      const error = yield* Effect.flip(
        read(undefined, { XDG_CONFIG_HOME: "/shut" }).pipe(
          Effect.provideService(FileSystem.FileSystem, shut)
        )
      )
      assert.deepStrictEqual(error.messages, ["/shut/pepsi.conf: permission denied"])
    }).pipe(Effect.provide(system))
  )
})

describe("the built-in profile", () => {
  it.effect("is complete, and delivers below $PEPSI_HOME", () =>
    Effect.gen(function* () {
      const env = { HOME: "/dev/null", PEPSI_HOME: "state" }
      const { ingress, pepsi, pipeline, warnings } = yield* read(undefined, env)
      assert.deepStrictEqual(warnings, [])
      assert.strictEqual(pepsi.HOSTNAME, "mail.pepsi.test")
      assert.include(pepsi.DOMAINS, "pepsi.test")
      assert.strictEqual(pepsi.USERS, "any")
      assert.deepStrictEqual([ingress.ADDRESS, ingress.PORT], ["127.0.0.1", 2525])
      assert.strictEqual(pepsi.STATE_DIR, resolve("state"))
      assert.strictEqual(
        pipeline.sections.get("local")!.settings["MAILDIR"],
        `${resolve("state")}/mail/{mailbox}`
      )
      assert.deepStrictEqual(
        [...pipeline.sections.values()].map(({ name, stage }) => [name, stage.name]),
        [
          ["init", "arc"],
          ["route", "if"],
          ["local", "local"],
          ["discard", "discard"]
        ]
      )
    }).pipe(Effect.provide(system))
  )
})

describe.skipIf(!existsSync(index))("the built-in profile with the stages there are", () => {
  it.effect("is right", () =>
    Effect.gen(function* () {
      const { registry } = yield* Effect.promise(
        () => import(index) as Promise<{ readonly registry: StagesRegistry.Registry<unknown> }>
      )
      const stages = StagesRegistry.names(registry)
      const provided = ConfigIni.fromFile(undefined).pipe(
        Layer.provide([environment({ HOME: "/dev/null" }), stages, NodeFileSystem.layer])
      )
      const { pipeline, warnings } = yield* Configuration.pipe(Effect.provide(provided))
      assert.deepStrictEqual(warnings, [])
      assert.deepStrictEqual([...pipeline.sections.keys()], ["init", "route", "local", "discard"])
    })
  )
})

describe("ConfigIni.fromText", () => {
  it.effect("makes the same configuration again, without files and environment", () =>
    Effect.gen(function* () {
      const directory = yield* example(0o600)
      const before = yield* read(`${directory}/pepsi.conf`, { PEPSI_HOME: "/srv/pepsi" })
      yield* Effect.flatMap(FileSystem.FileSystem, (files) =>
        files.remove(directory, { recursive: true })
      )
      const after = yield* again(before.text)
      assert.deepStrictEqual(after, before)
      assert.notInclude(before.text, "\n")
    }).pipe(Effect.provide(system))
  )

  it.effect("fails with what is wrong", () =>
    Effect.gen(function* () {
      for (const text of ["", "{}", '{"main":1}']) {
        const error = yield* Effect.flip(again(text))
        assert.strictEqual(error._tag, "ConfigurationInvalid")
        assert.include(error.message, "configuration handed over: ")
      }
    }).pipe(Effect.provide(FakeStages.layer))
  )
})
